"""Writes a sheet for a hand-in: what does not fit, then each answer with its row of the rubric and cited figures."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from course.table import Course
from handin.own_figures import describe, in_words
from handin.report import Question, sections_of
from staff.reports.evidence import what_does_not_fit
from staff.reports.handed_in import HandedIn

ANSWERS = Path(__file__).parents[1] / "answers" / "report.toml"
NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
UNITS = [10.0**power for power in (0, -3, 3, -6, 6, -2, 2)]  # ms, bytes, GB, percent of what the record has
TOLERANCE = 0.02
DIGITS = 4
OWN_RUNS = "own runs"  # column of the points' table
WORDS_IN_A_ROW, COPIED = 5, 0.5  # the share of an answer's sequences of five words that another has, too


@dataclass(frozen=True)
class Row:
    """A row of the rubric: what a full answer contains, a point each; a good, a weak and a wrong answer."""

    full: Sequence[str]
    good: str
    weak: str
    wrong: str


def rubric() -> dict[str, Row]:
    return {name: Row(**row) for name, row in tomllib.loads(ANSWERS.read_text(encoding="utf-8")).items()}


def questions(course: Course) -> list[Question]:
    return [question for section in sections_of(course) for question in section.questions]


def sheet(hand_in: HandedIn, others: Sequence[HandedIn], course: Course) -> str:
    """Return the sheet in Markdown."""
    rows, findings = rubric(), what_does_not_fit(hand_in, others, course)
    text = f"# {hand_in.name}\n\n## What does not fit\n\n"
    text += "".join(f"- {line}\n" for line in findings or ["nothing was found"]) + "\n"
    for question in questions(course):
        answer, row = hand_in.answers.get(question.name, ""), rows[question.name]
        text += f"## {question.name}: ___ of {question.points}\n\n{' '.join(question.text.split())}\n\n"
        text += "".join(f"> {line}\n" for line in answer.splitlines()) or "**empty: 0 points**\n"
        text += "\n"
        if same := copied_from(question, hand_in, others):
            text += f"**much of it is also in: {', '.join(same)}**\n\n"
        text += "".join(f"- [ ] {line}\n" for line in row.full if answer)
        text += "".join(f"- {line}\n" for line in cited(question, hand_in, answer, others) if answer) + "\n"
    return text


def cited(question: Question, hand_in: HandedIn, answer: str, others: Sequence[HandedIn]) -> list[str]:
    """Return a line for each figure that the answer must cite: is it there, and is it that of the records?

    If it is not, the line says whose records in the class have a number of the answer.
    """
    lines = []
    for name in question.cites:
        figure = hand_in.figures.get(name)
        if figure is None:
            lines.append(f"{describe(name)}: **no record**")
        elif number := _cited_number(answer, figure.value):
            lines.append(f"{describe(name)}: {in_words(figure)}; the answer says {number}: agrees")
        else:
            rows = {other.name: other.figures.get(name) for other in others if other is not hand_in}
            whose = [name for name, row in rows.items() if row and _has_digits_of(answer, row.value)]
            lines.append(
                f"{describe(name)}: {in_words(figure)}; **not in the answer**, which has {_numbers(answer)}"
                + (f"; **one is that of {', '.join(whose)}**" if whose else "")
            )
    return lines


def _cited_number(answer: str, value: float) -> str:
    """Return the number in an answer that is this value in some unit, to the digits with which it was written."""
    for word in NUMBER.findall(answer):
        number = float(word.replace(",", ""))
        rounding = 0.5 * 10.0 ** -len(word.partition(".")[2]) if "e" not in word.lower() and "." in word else 0.0
        if any(
            abs(number - value * unit) <= max(TOLERANCE * abs(value * unit), rounding * (number != 0)) for unit in UNITS
        ):
            return word
    return ""


def _has_digits_of(answer: str, value: float) -> bool:
    """Return whether a number in an answer is this value, to at least four digits: fewer may be equal by chance."""
    words = [word.replace(",", "") for word in NUMBER.findall(answer) if "e" not in word.lower()]
    long = [word for word in words if len(word.replace(".", "").strip("0")) >= DIGITS]
    halves = {word: 0.5 * 10.0 ** -len(word.partition(".")[2]) for word in long}
    return any(abs(float(word) - value * unit) <= 1.01 * half for word, half in halves.items() for unit in UNITS)


def _numbers(answer: str) -> str:
    return ", ".join(dict.fromkeys(NUMBER.findall(answer))) or "no number"


def copied_from(question: Question, hand_in: HandedIn, others: Sequence[HandedIn]) -> list[str]:
    """Return whose answers share much of this one's wording; words of the question do not count."""
    asked = _sequences(question.text)
    own = _sequences(hand_in.answers.get(question.name, "")) - asked
    shared = {
        other.name: len(own & _sequences(other.answers.get(question.name, ""))) / max(1, len(own))
        for other in others
        if other is not hand_in
    }
    return [name for name, share in shared.items() if share >= COPIED]


def _sequences(text: str) -> set[tuple[str, ...]]:
    """Return the sequences of words, numbers left out: own figures in a friend's sentences are still the friend's."""
    words = re.findall(r"[^\W\d_]+", text.casefold())
    return {tuple(words[i : i + WORDS_IN_A_ROW]) for i in range(len(words) - WORDS_IN_A_ROW + 1)}


def prefilled(hand_in: HandedIn, course: Course) -> Mapping[str, str]:
    """Return a line of the points' table: 0 for empty answers, nothing for those that a person has to read."""
    row = {question.name: "" if hand_in.answers.get(question.name) else "0" for question in questions(course)}
    return row | ({OWN_RUNS: f"{hand_in.own_run_points(course):g}"} if course.own_run_points else {})


def most_points(course: Course) -> dict[str, int]:
    """Return the columns of the points' table, and the most that each gives."""
    most = {question.name: question.points for question in questions(course)}
    return most | ({OWN_RUNS: course.own_run_points} if course.own_run_points else {})
