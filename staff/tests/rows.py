"""Rows of a class without a run of the graders, in their own form: for the grade book, the pages, the platforms."""

from collections.abc import Mapping
from typing import Any

from course.table import load_course
from grader.report import Entry, as_dict, function_of
from staff.grade.gradebook import GradedHandIn


def entry(
    region: str, status: str, observed: str = "", name: str = "test_it_works", most: int = 2, **fields: Any
) -> Entry:
    """A graded test; its id is as long as `name`, which may have a file in front."""
    id = name if "::" in name else f"tests/t.py::{name}"
    task = load_course().regions[region].task
    fields = {"kind": fields.get("cause") or function_of(id)} | fields
    return Entry(id, task, region, status, most if status == "passed" else 0, most, observed=observed, **fields)


def row(
    *entries: Entry, name: str = "alice", output: Mapping[str, object] | None = None, **run: object
) -> GradedHandIn:
    report = {"submission": name, "sandbox": {}, "environment": {"python": "3.11", "seed": 55}}
    report |= as_dict(entries, load_course().bonus_regions)
    return GradedHandIn(report, {"notes": [], "unreadable": False, "output": dict(output or {}), "flags": []} | run)
