"""Writes changes.csv: which hand-ins have other points than in their grading before, and by which tests."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from staff.grade import result_store
from staff.grade.gradebook import GradedHandIn, write_table
from staff.grade.texts import safe_cell

HEAD = ("submission", "score before", "score now", "region", "test", "before", "now", "points", "why", "reason")
NO_TEST = {"status": "no such test", "points": 0, "message": ""}


def write_changes(path: Path, out: Path, rows: Sequence[GradedHandIn]) -> None:
    """Write a line for each test whose points changed; the hand-ins are in the order of `rows`."""
    lines = [line for row in rows for line in changes(row, result_store.earlier(out, row.name))]
    write_table(path, HEAD, lines)


def changes(row: GradedHandIn, earlier: dict[str, Any]) -> Iterator[list[str | int]]:
    """The cells of each test whose points changed since the earlier grading; none if there was none."""
    before = {test["id"]: test for test in earlier.get("tests", [])}
    if not before:
        return
    now = {test["id"]: test for test in row.tests}
    sums = [sum(test["points"] for test in tests.values()) for tests in (before, now)]
    why = "the same hand-in" if earlier.get("hand_in") == row.run.get("hand_in") else "another hand-in"
    for id in {**now, **before}:
        old, new = before.get(id, NO_TEST), now.get(id, NO_TEST)
        if gained := new["points"] - old["points"]:
            region = {**old, **new}["region"]
            reason = safe_cell(new["message"] if gained < 0 else old["message"])
            yield [safe_cell(row.name), *sums, region, id, old["status"], new["status"], f"{gained:+}", why, reason]
