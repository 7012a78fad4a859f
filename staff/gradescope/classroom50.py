"""Writes the result.json that Classroom 50 asks for, schema classroom50/result/v1; autograder.py calls it.

The runner passes what it knows about a submission in environment variables.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from course.table import NOT_GRADED_HERE, Course, load_course
from staff.grade.gradebook import GradedHandIn
from staff.grade.hidden_tests import visible_part
from staff.grade.pages import sentence
from staff.gradescope.grade_submission import grade_one

TEXTS = {  # field -> variables of the runner, the first that is set counts
    "classroom": ("CLASSROOM",),
    "assignment": ("ASSIGNMENT",),
    "assignment_type": ("ASSIGNMENT_TYPE",),
    "owner": ("OWNER", "USERNAME"),
    "submission": ("SUBMISSION_TAG",),
    "commit": ("COMMIT_URL",),
    "release": ("RELEASE_URL",),
    "review": ("REVIEW_URL", "COMMIT_URL"),
}


def unfinished(course: Course, environment: Mapping[str, str], now: datetime) -> dict[str, object]:
    """The content of result.json until there is something better: no points.

    Raises:
        InputError: the runner did not say what the schema requires.
    """
    texts = {field: next(filter(None, map(environment.get, names)), "") for field, names in TEXTS.items()}
    texts["assignment_type"] = texts["assignment_type"] or "individual"
    if missing := [TEXTS[field][0] for field, text in texts.items() if not text]:
        raise InputError(
            f"the environment variable {missing[0]} is not set; run autograder.py in Classroom 50's runner"
        )
    if not texts["submission"].startswith("submit"):
        raise InputError(f"SUBMISSION_TAG: expected a tag that begins with submit, got {texts['submission']!r}")
    time = {"datetime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    return {"schema": "classroom50/result/v1", **texts, **time, "score": 0, "max-score": course.total, "tests": []}


def result(row: GradedHandIn, course: Course, environment: Mapping[str, str], now: datetime) -> dict[str, Any]:
    """The content of result.json. Raises InputError as `unfinished` does."""
    tests = [
        {
            "test-name": f"{test['region']} {sentence(test['id'])}{not_here(test)}",
            "passed": test["status"] == "passed",
            "score": test["points"],
            "max-score": test["max_points"],
        }
        for test in visible_part(row, course).tests
    ]
    score = {"score": row.report["score"], "max-score": row.report["max_score"]}
    return unfinished(course, environment, now) | score | {"tests": tests}


def not_here(test: Mapping[str, object]) -> str:
    return f" ({NOT_GRADED_HERE})" if test["status"] == NOT_GRADED_HERE else ""


def _write(path: Path, content: dict[str, object]) -> None:
    with atomic_write(path) as file:
        json.dump(content, file, indent=1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the student's repository; result.json is written there")
    parser.add_argument("--timeout", type=float, default=1500, help="seconds (%(default)s)")
    options = parser.parse_args(argv)
    course, path = load_course(), options.checkout / "result.json"
    # First, since one that the student has committed would count if the workflow were stopped.
    _write(path, unfinished(course, os.environ, datetime.now(UTC)))
    row = grade_one(options.checkout, options.timeout)
    _write(path, result(row, course, os.environ, datetime.now(UTC)))
    print(json.dumps({"score": row.report["score"], "max_score": row.report["max_score"]}))


if __name__ == "__main__":
    exit_on_input_error(main)
