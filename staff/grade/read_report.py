"""Reads what the graders report about one hand-in. Messages can quote a hand-in, so every text is clipped here, once.

Everything that formats, searches or groups these texts later (pages, grade book, Gradescope) relies on it.
"""

import json
from pathlib import Path
from typing import Any

from staff.grade.submissions import printable

LARGEST_REPORT = 64 << 20  # bytes
LONGEST_MESSAGE = 4000  # characters
LONGEST_LINE = 1000
LONGEST_END = 300  # of "raised at task1_single/run_glue.py:12"
LONGEST_OUTPUT = 4000  # of a rank's stdout or stderr, the last ones
MOST_RANKS, MOST_FLAGS, MOST_WARNINGS = 16, 50, 20
Tests = list[dict[str, Any]]


def read_report(path: Path) -> dict[str, Any]:
    """Tests, output and flags of a report.json of the graders. A report that cannot be read has none.

    `notes` says what staff and student should know about it.
    """
    nothing: dict[str, Any] = {"tests": [], "output": {}, "flags": [], "notes": []}
    if not path.exists():
        return nothing
    if path.stat().st_size > LARGEST_REPORT:
        return nothing | {
            "notes": [f"the graders' report is too large ({path.stat().st_size >> 20} MiB) and was not read"]
        }
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return nothing | {"notes": [f"the graders' report cannot be read: {type(error).__name__}"]}
    return {
        "tests": [test | {"message": message(test["message"])} for test in told["tests"]],
        "output": {id: [_rank(rank) for rank in ranks[:MOST_RANKS]] for id, ranks in told["output"].items()},
        "flags": [flag(row) for row in told.get("flags", [])[:MOST_FLAGS]],
        "notes": [message(words) for words in told.get("warnings", [])[:MOST_WARNINGS]],
    }


def message(text: str) -> str:
    """A message as it is kept: no line and not the whole is longer than a page can show."""
    text = clip(text, LONGEST_MESSAGE)
    return printable("\n".join(clip(line, LONGEST_LINE) for line in text.split("\n")))


def flag(row: Any) -> dict[str, Any]:
    """Something to look at by hand: where, and what was seen there. A dict, or its values (file, line, what)."""
    row = row if isinstance(row, dict) else dict(zip(("file", "line", "what"), row, strict=False))
    texts = {key: printable(clip(str(row.get(key, "")), LONGEST_END)) for key in ("file", "what")}
    return texts | {"line": int(row.get("line") or 0)}


def clip(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"


def _rank(rank: dict[str, Any]) -> dict[str, Any]:
    """Escape sequences stay: pages.as_shown follows them as a terminal does."""
    printed = {name: without_surrogates(rank[name][-LONGEST_OUTPUT:]) for name in ("stdout", "stderr")}
    return {"rank": int(rank["rank"]), "ended": printable(clip(rank["ended"], LONGEST_END))} | printed


def without_surrogates(text: str) -> str:
    """A lone half of a character cannot be written to any file: an escape in its place."""
    return text.encode("utf-8", "backslashreplace").decode()
