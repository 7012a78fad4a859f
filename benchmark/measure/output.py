"""What a command leaves: tables as text, Markdown, LaTeX and CSV, and the figures as JSON in a file and its last line.

The first line of a table has the headings.
"""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.paths import atomic_write

MB = 10**6  # bytes
Json = dict[str, Any]  # an object of JSON
Lines = Sequence[Sequence[object]]


def shown(value: object) -> str:
    """Return a figure with four digits; None as a dash, a list of three as an interval, the rest as it is."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        from benchmark.measure.intervals import interval_text  # here: it loads scipy

        return interval_text(*value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def cell(value: float | str | None, digits: int = 2, unit: float = 1.0) -> str:
    """A figure in units of `unit`; a word as it is; a dash for what was not measured."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value / unit:.{digits}f}"


def text_table(lines: Lines) -> str:
    """Names to the left, figures to the right."""
    texts = [list(map(shown, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    padded = [[text[0].ljust(widths[0]), *map(str.rjust, text[1:], widths[1:])] for text in texts]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def markdown(lines: Lines) -> str:
    heads, *texts = [list(map(shown, line)) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *texts])


def latex(lines: Lines, caption: str) -> str:
    """A table for a paper, which needs the package booktabs."""
    texts = [" & ".join(map(escaped, map(shown, line))) + r" \\" for line in lines]
    columns = "l" + "r" * (len(lines[0]) - 1)
    one_line = escaped("; ".join(caption.splitlines()))
    begin = [r"\begin{table}", r"\centering", rf"\caption{{{one_line}}}", rf"\begin{{tabular}}{{{columns}}}"]
    body = [r"\toprule", texts[0], r"\midrule", *texts[1:], r"\bottomrule"]
    return "\n".join([*begin, *body, r"\end{tabular}", r"\end{table}"]) + "\n"


def escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "%&_#$" else letter for letter in text)


def write_csv(path: Path, lines: Iterable[Sequence[object]]) -> None:
    with atomic_write(path) as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def publish(result: Json, path: Path) -> None:
    """Keep the figures, and print them as the last line."""
    with atomic_write(path) as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result), flush=True)
