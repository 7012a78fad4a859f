"""The questions on own runs of a hand-in: what they are about, and what was answered at home."""

from course.table import Course
from handin.own_run_questions import OwnRunQuestion, Subject
from handin.quiz import check
from handin.records import DAMAGED
from staff.reports.handed_in import HandedIn

COLUMN = "own runs"  # of the points' table


def subject(hand_in: HandedIn) -> Subject:
    return Subject({name: text.decode(errors="replace") for name, text in hand_in.code.items()}, hand_in.runs)


def answered_at_home(hand_in: HandedIn) -> list[tuple[OwnRunQuestion, str, bool]]:
    """Return the questions that `submit.py questions` asked, the answers, and whether each is right by the records."""
    try:
        return check(subject(hand_in), hand_in.asked) if hand_in.asked else []
    except DAMAGED:
        return []


def points(hand_in: HandedIn, course: Course) -> float:
    """Return the share of the course's points for own-run questions that was answered right."""
    answers = answered_at_home(hand_in)
    return round(course.own_run_points * sum(right for *_, right in answers) / max(1, len(answers)), 1)
