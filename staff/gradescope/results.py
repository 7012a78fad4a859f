"""Gradescope's results.json from a report, and late days from its submission_metadata.json.

The fields are those of Gradescope's autograder specification. Gradescope cuts what is longer
than 100,000 characters, wherever that happens to be, so the texts are kept short here. Tests that fail for one reason
are grouped as in the terminal. Hidden tests have groups of their own (staff/grade/hidden_tests.py).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from common.errors import InputError
from course.table import NOT_GRADED_HERE, Course, score_in_words
from grader import messages
from grader.report import Entry
from staff.grade.gradebook import GradedHandIn
from staff.grade.hidden_tests import VISIBILITIES, visibility, visible_part
from staff.grade.pages import entries, ranks_alike, sentence
from staff.grade.texts import clip

MARGIN = 40.0  # seconds before the platform's time-out: to end the graders, to sweep, to write
SOLVED_PER_UNTOUCHED = 3.0  # times as long, bonus included
LONGEST_TEST = 4000  # characters of one test's output
LONGEST_RANKS = 1500  # of them what ranks printed


def too_slow(row: GradedHandIn, seconds: float, timeout: float) -> str:
    """Say that the container is too slow for its time-out, or nothing. The untouched handout, which an instructor
    submits before the term, tells how long a solution would take."""
    if row.run.get("stopped"):
        return f"the graders were stopped by the time-out of {timeout:g} s: choose a larger container or time-out"
    untouched = all(test["status"] in ("not attempted", "skipped", NOT_GRADED_HERE) for test in row.tests)
    expected = seconds * SOLVED_PER_UNTOUCHED
    if untouched and not row.run["unreadable"] and expected > timeout - MARGIN:
        return (
            f"a solution will take about {expected:.0f} s here, of {timeout:g} s: choose a larger container or time-out"
        )
    return ""


def results(row: GradedHandIn, course: Course, late: int | None, seconds: float, slow: str = "") -> dict[str, Any]:
    """The content of results.json; `late` is in days, None without a due date; `slow` is what `too_slow` says.

    What to look at by hand is in extra_data alone, which students never see: a hidden test would hide their score, too.
    """
    report, flags = row.report, row.run.get("flags", [])
    shown = visible_part(row, course)
    lines = [f"{score_in_words(shown.report)}.", *row.run["notes"], *messages.seed_line(entries(shown))]
    if late is not None:
        lines.append(f"Late days: {late}.")
    return {
        "score": report["score"] + report.get("bonus", 0),  # above the assignment's points: extra credit
        "execution_time": math.ceil(seconds),
        "output": "\n".join(lines),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "extra_data": {
            "late_days": late,
            "sandbox": report["sandbox"],
            "environment": report["environment"],
            "look_at_by_hand": flags,
            **({"too_slow": slow} if slow else {}),
        },
        "tests": [_test(test, text, course) for test, text in _texts(row, course)],
    }


def _texts(row: GradedHandIn, course: Course) -> Iterator[tuple[Entry, str]]:
    """All tests with what each says, region by region; hidden tests apart from visible ones."""
    tests = entries(row)
    for region in course.in_order_of_needs():
        for kind in VISIBILITIES:
            tests_of_kind = [test for test in tests if test.region == region and visibility(test.id, course) == kind]
            hint = "" if row.run["unreadable"] else course.regions[region].hints[0]
            yield from _of_region(tests_of_kind, hint, row.run["output"])


def _of_region(tests: list[Entry], hint: str, output: Mapping[str, Any]) -> Iterator[tuple[Entry, str]]:
    """A region's tests with their texts: failed ones by their reason, the most telling first and in full."""
    for number, (first, *rest) in enumerate(messages.by_kind(filter(messages.tells, tests))):
        text = messages.in_a_line(first) if number else messages.in_full(first)
        if rest:
            text += f"\n\nThe same: {'; '.join(sentence(test.id) for test in rest)}"
        if not number:
            text += f"\n\nHint: {hint}" if hint and first.status not in ("skipped", NOT_GRADED_HERE) else ""
            text += _printed(next(filter(None, (output.get(test.id) for test in (first, *rest))), []))
        yield first, clip(text, LONGEST_TEST)
        yield from ((test, f'{test.status}, for the same reason as "{sentence(first.id)}"') for test in rest)
    for test in tests:
        if not messages.tells(test):
            yield test, "" if test.status == "passed" else f"{test.status}: {test.text}"


def _test(test: Entry, text: str, course: Course) -> dict[str, object]:
    return {
        "score": test.points,
        "max_score": test.max_points,
        "status": "passed" if test.status == "passed" else "failed",
        "name": sentence(test.id),
        "name_format": "text",
        "number": test.region,
        "output": text,
        "output_format": "text",
        "tags": [course.tasks[test.task].title, *(["bonus"] if test.region in course.bonus_regions else [])],
        "visibility": visibility(test.id, course),
    }


def _printed(output: Sequence[dict[str, Any]]) -> str:
    """What the ranks printed and how they ended."""
    text = ""
    for rank in ranks_alike(output):
        printed = "\n".join(filter(None, (rank["stdout"], rank["stderr"])))
        text += f"\n\n{rank['ranks']} {rank['ended']}\n{printed[-LONGEST_RANKS:]}"
    return text


def unfinished(why: str) -> dict[str, object]:
    """What stands in results.json until there is something better."""
    formats = {"output_format": "text", "visibility": "visible", "stdout_visibility": "hidden"}
    return {"score": 0, "output": why, **formats, "tests": []}


def late_days(path: Path) -> int | None:
    """Days after the due date, each that has begun; None without a due date. An extension of a student counts.

    Of a group's several due dates the latest does.

    Raises:
        InputError: a date without a time zone, which nobody can compare.
    """
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        created = datetime.fromisoformat(metadata["created_at"])
        assignments = [metadata["assignment"], *(user.get("assignment") or {} for user in metadata.get("users") or [])]
        dates = [assignment["due_date"] for assignment in assignments if assignment.get("due_date")]
        due_dates = [datetime.fromisoformat(date) for date in dates]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no metadata (a local try), or none that can be read: nobody is called late for it
    if naive := [date for date in (created, *due_dates) if date.tzinfo is None]:
        raise InputError(f"{path.name}: expected dates with a time zone, got {naive[0].isoformat()}; fix the due date")
    if not due_dates:
        return None
    return max(0, math.ceil((created - max(due_dates)) / timedelta(days=1)))
