"""What a command leaves: a table for people, a CSV, and the figures as JSON in a file and in its last line."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.paths import atomic_write

MB = 10**6  # bytes


def text_table(rows: Iterable[Sequence[object]], digits: int = 2) -> str:
    """The rows, the first of which has the headings: names to the left, figures to the right.

    Texts and whole numbers are shown as they are, other numbers with so many digits, and None as a dash.
    """
    lines = [[cell(v, digits) if v is None or isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in lines
    )
    return "\n".join(text.rstrip() for text in texts)


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Return rows with the same figures as text. "holds" is no figure: where it is False, the row is marked."""
    heads = [name for name in rows[0] if name != "holds"]
    lines = [
        [*(figure_text(row[name]) for name in heads), "" if row.get("holds", True) else "<-- outside"] for row in rows
    ]
    return text_table([[*heads, ""], *lines])


def figure_text(value: Any) -> str:
    """Return a figure with four digits; whole numbers and words as they are; of a list of three an interval."""
    if isinstance(value, list | tuple):
        from benchmark.measure.intervals import interval_text  # here: it loads scipy

        return interval_text(*value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def cell(value: float | str | None, digits: int = 2, unit: float = 1.0, missing: str = "-") -> str:
    """A figure in units of `unit`; a word as it is; a dash for what was not measured."""
    if isinstance(value, str):
        return value
    return missing if value is None else f"{value / unit:.{digits}f}"


def write_csv(path: Path, rows: Iterable[Sequence[object]], comment: str = "") -> None:
    """Write rows; the comment, if there is one, is the first line."""
    with atomic_write(path) as file:
        if comment:
            file.write(f"# {comment}\n")
        csv.writer(file, lineterminator="\n").writerows(rows)


def publish(result: dict[str, Any], path: Path) -> None:
    """Keep the figures, and print them as the last line."""
    with atomic_write(path) as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result), flush=True)
