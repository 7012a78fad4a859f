"""The student's own sections of a report: text between two comment lines, kept when the report is built again.

<!-- your words: reasons -->
...
<!-- end of your words: reasons -->
"""

import hashlib
import re

from common.errors import InputError

_OPEN = re.compile(r"<!-- your words: ([a-z0-9_]+) -->")
_CLOSE = re.compile(r"<!-- end of your words: ([a-z0-9_]+) -->")
_EMPTY = "*Not written yet.*"
_FINGERPRINT = re.compile(r"<!-- built: ([0-9a-f]{16}) -->\n?")


def read_words(text: str, file: str) -> dict[str, str]:
    """Return section -> its text, without blank lines at both ends.

    Raises:
        InputError: a section is not closed, closed twice or opened twice.
    """
    words: dict[str, str] = {}
    opened, begin = "", 0
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        if start := _OPEN.fullmatch(line.strip()):
            if opened:
                raise InputError(f"{where}: expected '{_closing(opened)}' above this line; put it back")
            if start[1] in words:
                raise InputError(f"{where}: section {start[1]!r} appears twice; keep one")
            opened, begin = start[1], number
        elif end := _CLOSE.fullmatch(line.strip()):
            if end[1] != opened:
                raise InputError(
                    f"{where}: section {end[1]!r} has an end marker but no start marker; put its first line back above"
                )
            words[opened] = "\n".join(lines[begin : number - 1]).strip("\n")
            opened = ""
    if opened:
        raise InputError(f"{file}:{begin}: expected the line '{_closing(opened)}' below, got the file's end; add it")
    return words


def section(name: str, words: dict[str, str], ask: str) -> str:
    """Return a section with its markers and its text; `ask` is a comment that says what to write there."""
    text = words.get(name, "").strip("\n")
    empty = "" if text.strip() else f"{_EMPTY}\n\n"
    inside = f"{text}\n" if text.strip() else "\n"
    return f"<!-- {ask} -->\n\n{empty}<!-- your words: {name} -->\n{inside}{_closing(name)}\n"


def with_fingerprint(text: str) -> str:
    """Add a last line with a fingerprint of everything outside the sections, so that a later build sees a change."""
    return f"{text}<!-- built: {_digest(text)} -->\n"


def is_unchanged_outside(text: str) -> bool:
    """Return whether only the sections of a report with its fingerprint were changed."""
    match = _FINGERPRINT.search(text)
    return match is not None and _digest(_FINGERPRINT.sub("", text)) == match[1]


def _closing(name: str) -> str:
    return f"<!-- end of your words: {name} -->"


def _digest(text: str) -> str:
    """Return the fingerprint of the text without its sections."""
    kept, inside = [], False
    for line in text.split("\n"):
        inside = inside and not _CLOSE.fullmatch(line.strip())
        if not inside and line.strip() not in ("", _EMPTY):
            kept.append(line)
        inside = inside or bool(_OPEN.fullmatch(line.strip()))
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
