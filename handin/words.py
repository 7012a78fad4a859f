"""A student's own words in report.md: text between two comment lines, kept when the report is built again.

<!-- your words: 2a_bytes -->
...
<!-- end of your words: 2a_bytes -->
"""

import hashlib
import re

from common.errors import InputError

MARKER = re.compile(r"^[ \t]*<!-- (?:end of )?your words: (\w+) -->[ \t]*$", re.MULTILINE)
SECTION = re.compile(
    r"^[ \t]*<!-- your words: (\w+) -->(.*?)^[ \t]*<!-- end of your words: \1 -->", re.MULTILINE | re.DOTALL
)
BUILT = re.compile(r"<!-- built: (\w+) -->\n?")
EMPTY = "*Not answered yet.*"


def read_words(text: str, file: str) -> dict[str, str]:
    """Return the words of each section by its name. Raises InputError where a marker is missing or appears twice."""
    words = {match[1]: match[2].strip("\n") for match in SECTION.finditer(text)}
    markers = list(MARKER.finditer(text))
    for marker in markers:
        name = marker[1]
        if sum(other[1] == name for other in markers) != 2 or MARKER.search(words.get(name, marker[0])):
            line = text.count("\n", 0, marker.start()) + 1
            raise InputError(
                f"{file}:{line}: expected '<!-- your words: {name} -->' once, and below your words '<!-- end of your "
                f"words: {name} -->'; put back the line that is missing, or delete the one that appears twice"
            )
    return words


def section(name: str, words: str) -> str:
    """Return a section with its markers."""
    empty = "" if words.strip() else f"{EMPTY}\n\n"
    return f"{empty}<!-- your words: {name} -->\n\n{words}\n\n<!-- end of your words: {name} -->\n\n"


def with_fingerprint(text: str) -> str:
    """Add a last line by which the next build sees whether anything was written outside of the sections."""
    return f"{text}<!-- built: {_fingerprint(text)} -->\n"


def is_unchanged_outside(text: str) -> bool:
    """Return whether only the sections of a report were changed since it was built."""
    match = BUILT.search(text)
    return match is not None and _fingerprint(BUILT.sub("", text)) == match[1]


def _fingerprint(text: str) -> str:
    outside = SECTION.sub("", text).replace(EMPTY, "")
    return hashlib.sha256("".join(outside.split()).encode()).hexdigest()[:16]
