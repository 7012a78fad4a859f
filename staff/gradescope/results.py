"""Gradescope's results.json from a report, and late days from its submission_metadata.json.

The fields are those of Gradescope's autograder specification. A text above 100,000 characters is cut there, in the
middle of whatever stands at that place, so the texts are kept short here.
"""

import json
import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from course.table import Course, score_in_words
from staff.grade.gradebook import Row
from staff.grade.pages import ranks_alike, sentence

LONGEST_TEST = 4000  # characters of one test's output
LONGEST_RANKS = 1500  # of them what ranks printed


def results(row: Row, course: Course, late: int | None, seconds: float) -> dict[str, Any]:
    """The content of results.json; `late` is in days, None without a due date.

    What to look at by hand is in extra_data alone, which students never see: a hidden test would hide their score, too.
    """
    report, flags = row.report, row.run.get("flags", [])
    lines = [f"{score_in_words(report)}.", *row.run["notes"]]
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
        },
        "tests": [_test(test, row, course) for test in report["tests"]],
    }


def _test(test: dict[str, Any], row: Row, course: Course) -> dict[str, Any]:
    passed = test["status"] == "passed"
    return {
        "score": test["points"],
        "max_score": test["max_points"],
        "status": "passed" if passed else "failed",
        "name": sentence(test["id"]),
        "name_format": "text",
        "number": test["region"],
        "output": "" if passed else _output(test, row, course),
        "output_format": "text",
        "tags": [course.tasks[test["task"]].title, *(["bonus"] if test["task"] in course.bonus_tasks else [])],
        "visibility": visibility(test["id"], course),
    }


def visibility(test: str, course: Course) -> str:
    """Tests of the handout are visible; for hidden ones course.toml decides."""
    return str(course.hidden.get("visibility", "hidden")) if test.startswith("staff/") else "visible"


def _output(test: dict[str, Any], row: Row, course: Course) -> str:
    """The message, the first hint, and what the ranks printed."""
    text = f"{test['status']}: {test['message']}"
    if test["status"] not in ("skipped", "not attempted"):
        text += f"\n\nHint: {course.regions[test['region']].hints[0]}"
    for rank in ranks_alike(row.run["output"].get(test["id"], [])):
        printed = "\n".join(filter(None, (rank["stdout"], rank["stderr"])))
        text += f"\n\n{rank['ranks']} {rank['ended']}\n{printed[-LONGEST_RANKS:]}"
    return text if len(text) <= LONGEST_TEST else f"{text[:LONGEST_TEST]}\n... (cut)"


def unfinished(why: str) -> dict[str, Any]:
    """What stands in results.json until there is something better."""
    formats = {"output_format": "text", "visibility": "visible", "stdout_visibility": "hidden"}
    return {"score": 0, "output": why, **formats, "tests": []}


def late_days(path: Path) -> int | None:
    """Days after the due date, each that has begun; None without a due date. An extension of a student counts.

    Of a group's several due dates the latest does.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        created = datetime.fromisoformat(told["created_at"])
        assignments = [user.get("assignment") or {} for user in told.get("users") or []]
        dates = [mine["due_date"] for mine in [told["assignment"], *assignments] if mine.get("due_date")]
        due = max(datetime.fromisoformat(date) for date in dates)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no metadata (a local try), or none that can be read: nobody is called late for it
    return max(0, math.ceil((created - due) / timedelta(days=1)))
