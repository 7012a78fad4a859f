"""Reads what the graders report about one hand-in. Messages can quote a hand-in, so every text is cut: see texts.py."""

import json
from pathlib import Path
from typing import Any

from staff.grade import texts

LARGEST_REPORT = 64 << 20  # bytes
Tests = list[dict[str, Any]]


def nothing(*notes: str) -> dict[str, Any]:
    """What is known of a hand-in without a report."""
    return {"tests": [], "output": {}, "flags": [], "notes": list(notes)}


def read_report(path: Path) -> dict[str, Any]:
    """Tests, output and flags of a report.json of the graders. A report that cannot be read has none.

    `notes` says what staff and student should know about it.
    """
    if not path.exists():
        return nothing()
    if path.stat().st_size > LARGEST_REPORT:
        return nothing(f"the graders' report is too large ({path.stat().st_size >> 20} MiB) and was not read")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return nothing(f"the graders' report cannot be read: {type(error).__name__}")
    most = texts.MOST_RANKS
    return {
        "tests": [test | {"message": texts.message(test["message"])} for test in report["tests"]],
        "output": {id: [texts.output(rank) for rank in ranks[:most]] for id, ranks in report["output"].items()},
        "flags": [texts.flag(row) for row in report.get("flags", [])[: texts.MOST_FLAGS]],
        "notes": texts.notes(report.get("warnings", [])),
    }
