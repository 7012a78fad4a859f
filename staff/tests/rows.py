"""A row of a class without a run of the graders: for the tests of the grade book, the pages and the platforms."""

from typing import Any

from staff.grade.gradebook import Row


def a_test(region: str, status: str, message: str = "", name: str = "test_it_works", most: int = 2) -> dict[str, Any]:
    """A graded test as it is in a report."""
    points = most if status == "passed" else 0
    return {"id": f"tests/t.py::{name}", "task": region.split(".")[0], "region": region, "status": status,
            "points": points, "max_points": most, "message": message}  # fmt: skip


def a_row(*tests: dict[str, Any], name: str = "alice", **run: Any) -> Row:
    score, most = (sum(test[key] for test in tests) for key in ("points", "max_points"))
    report = {"submission": name, "score": score, "max_score": most, "tests": list(tests), "sandbox": {}}
    environment = {"python": "3.11", "seed": 55}
    return Row(report | {"environment": environment}, {"notes": [], "unreadable": False, "output": {}} | run)
