"""Cuts texts that come from a hand-in, for pages, grade book, terminal and Gradescope.

A hand-in chooses its names, messages, notes and what it prints. Each reader has a limit: Python's csv takes 131,072
characters in a cell, Excel 32,767, Gradescope 100,000 in one output.
"""

import re
from collections.abc import Sequence
from typing import Any

LONGEST_MESSAGE = 4000  # characters
LONGEST_LINE = 1000
LONGEST_NOTE = 500
LONGEST_END = 300  # of "raised at task1_single/run_glue.py:12"
LONGEST_OUTPUT = 4000  # of a rank's stdout or stderr, the last ones
LONGEST_CELL = 32_000
MOST_RANKS, MOST_FLAGS, MOST_NOTES = 16, 50, 20
# A spreadsheet would run a cell that begins so, also in wide letters; and of a file of ours some take `;` or `|` for
# what separates cells.
FORMULA = re.compile(r"(?:^|(?<=[;|\t\n]))(?=\s*[=+\-@＝＋－＠\t\r])")


def clip(text: str, most: int) -> str:
    """At most `most` characters of a text, printable ones: an escape is longer than the character it stands for."""
    short = printable(text[:most])[:most]
    return short if len(text) <= most else f"{short} ... ({len(text) - most:,} more characters)"


def message(text: str, most: int = LONGEST_MESSAGE) -> str:
    """A message as it is kept: no line and not the whole is longer than a page can show."""
    return "\n".join(clip(line, LONGEST_LINE) for line in clip(text, most).split("\n"))


def in_one_line(text: str, most: int) -> str:
    """A text as one line: a name with a line end in it must not add a line of its own to what a reader sees."""
    return clip(text.replace("\n", "\\n").replace("\t", " "), most)


def notes(texts: Sequence[str]) -> list[str]:
    """The notes of one hand-in: not too many, and each one line that is not too long."""
    clipped = [in_one_line(text, LONGEST_NOTE) for text in texts[:MOST_NOTES]]
    return clipped if len(texts) <= MOST_NOTES else [*clipped[:-1], f"{len(texts) - MOST_NOTES + 1} more notes"]


def flag(row: dict[str, Any]) -> dict[str, object]:
    """Something to look at by hand: where, and what was seen there."""
    return {key: in_one_line(row[key], LONGEST_END) for key in ("file", "what")} | {"line": int(row["line"])}


def output(rank: dict[str, Any]) -> dict[str, object]:
    """What a rank printed last and how it ended. Escape sequences stay: pages.as_shown follows them as a terminal."""
    printed = {name: without_surrogates(rank[name][-LONGEST_OUTPUT:]) for name in ("stdout", "stderr")}
    return {"rank": int(rank["rank"]), "ended": in_one_line(rank["ended"], LONGEST_END)} | printed


def safe_cell(text: str) -> str:
    """A cell that every spreadsheet can read and none runs."""
    return clip(FORMULA.sub("'", text), LONGEST_CELL)


def printable(text: str) -> str:
    """The text with what a terminal, a table or a page could trip over written as an escape."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "replace").decode() for c in text
    )


def without_surrogates(text: str) -> str:
    """A lone half of a character cannot be written to any file: an escape in its place."""
    return text.encode("utf-8", "backslashreplace").decode()
