"""Compares what a made class was graded with what each submission is: full marks, none, or the very tests to fail.

    python -m staff.proofs.class_check class graded

`class` is from staff.proofs.class_of_submissions, `graded` from staff.grade. Last line of stdout: {"submissions": n,
"as_expected": n}; exit code 0 only if all are.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import InputError, exit_on_input_error
from course.table import Course, load_course
from staff.grade.result_store import folder_of

UNREADABLE = ("a truncated zip", "a text called .zip", "a name that leads out", "an empty zip", "nothing of the course")


def complaints(made: Mapping[str, Any], report: Mapping[str, Any], course: Course) -> list[str]:
    """What a report says otherwise than it must about a submission of this kind."""
    expects = made["expects"]
    if made["form"] in UNREADABLE:
        return [] if report["score"] == 0 else [f"expected 0 points for {made['form']}, got {report['score']}"]
    allowed = may_fail(made, report, course)
    lost = [test for test in report["tests"] if test["status"] != "passed" and test["id"] not in allowed]
    full = {function(test) for test in report["tests"]} - {
        function(test) for test in report["tests"] if test["status"] != "passed"
    }
    found = [f"{test['id']}: expected passed, got {test['status']}" for test in lost]
    found += [f"{name}: expected failed, got passed" for name in expects.get("fails", []) if name in full]
    return found + [
        f"{test['id']}: expected no point for region {test['region']}, which is open; got {test['points']}"
        for test in report["tests"]
        if test["region"] in expects.get("open", []) and test["points"]
    ]


def function(test: Mapping[str, Any]) -> str:
    """The test's name without its file and its case."""
    return test["id"].rpartition("::")[2].split("[")[0]


def may_fail(made: Mapping[str, Any], report: Mapping[str, Any], course: Course) -> set[str]:
    """Tests that may lose points: the listed ones, those skipped because of them, those of an attacker's own task."""
    tests, expects = report["tests"], made["expects"]
    attacked = {region.task for region in course.regions.values() if region.file in expects.get("files", [])}
    bad = set(expects.get("open", [])) | {region.id for region in course.regions.values() if region.task in attacked}
    bad |= {test["region"] for test in tests if function(test) in expects.get("fails", [])}
    return {test["id"] for test in tests if bad and may_lose(test, bad, course)}


def may_lose(test: Mapping[str, Any], bad: set[str], course: Course) -> bool:
    region = test["region"]
    return region in bad or test["status"] == "skipped" or not bad.isdisjoint(course.all_needs(region))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("made", type=Path, metavar="CLASS")
    parser.add_argument("graded", type=Path, metavar="GRADED")
    options = parser.parse_args(argv)
    try:
        made = json.loads((options.made / "class.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{error.filename} is missing; run class_of_submissions and staff.grade first") from None
    course, right = load_course(), 0
    for name, row in made.items():
        try:
            report = json.loads((folder_of(options.graded, name) / "report.json").read_text())
        except (OSError, ValueError) as error:
            print(f"{name}  not graded: {type(error).__name__}")
            continue
        found = complaints(row, report, course)
        right += not found
        score = f"{report['score']:3} of {report['max_score']}"
        print(f"{name}  {score}  {row['kind']:11} {'as expected' if not found else '; '.join(found)}")
    print(json.dumps({"submissions": len(made), "as_expected": right}))
    sys.exit(0 if right == len(made) else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
