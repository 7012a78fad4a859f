"""The one parser of regions: finds them, replaces and strips their bodies, and refuses what only almost looks like one.

        # TODO(cos598d) 1.2: what to do (1 line)
        # BEGIN SOLUTION 1.2
        loss.backward()
        # END SOLUTION 1.2

In the handout the TODO line stays, a `raise NotImplementedError` stands for the body, and `# END TODO 1.2` marks where
a student's lines stop (course/todo.py reads them back). Only comments count, never text inside a string. A marker
that is misspelt must not leak a solution without a word: the other two then lack it, and one that is nearly right is an
error by itself.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import InputError
from course.table import Course
from course.todo import REGION_ID, Comment, indent_body, lines_inside_strings, read_comments, read_tokens, take_body

_MARKERS = {  # groups: the id, and the text of a TODO; () matches nothing, so that the others have a second one, too
    "TODO": re.compile(rf"# TODO\(cos598d\) ({REGION_ID}): (\S(?:.*\S)?)"),
    "BEGIN": re.compile(rf"# BEGIN SOLUTION ({REGION_ID})()"),
    "END": re.compile(rf"# END SOLUTION ({REGION_ID})()"),
}
_NEARLY = re.compile(r"\(cos598d|\b(begin|end|start|stop)\W*solution", re.IGNORECASE)
_SPELLING = "'# TODO(cos598d) ID: text', '# BEGIN SOLUTION ID' and '# END SOLUTION ID'"
_LONGEST_LINE = 120
STAFF_ONLY = re.compile(
    rb"^(#|<!--) === staff only", re.MULTILINE
)  # in course.toml and texts: the rest is not for students


@dataclass(frozen=True)
class Region:
    """One solved region. An id may have several parts in one file, numbered from 1; `body` starts at column 0.

    `line` and `end_line` are those of the TODO and the END SOLUTION line, counted from 1.
    """

    file: str
    id: str
    part: int
    line: int
    end_line: int
    indent: str
    todo: str
    body: str


class _Marker(NamedTuple):
    kind: str
    id: str
    text: str
    line: int
    indent: str


@functools.lru_cache(maxsize=512)  # entries of a bank and handouts ask for the same files, one after the other
def find_regions(text: str, file: str = "file") -> tuple[Region, ...]:
    """The regions of one file, in order.

    Raises:
        InputError: with file and line: a near miss of a marker, a region nested, unclosed, empty, closed by another
            id, at another indent than its markers, or with tabs.
    """
    tokens = read_tokens(text, file)
    regions: list[Region] = []
    opened: list[_Marker] = []  # the TODO, then the BEGIN, of the region we are in
    for marker in (marker for comment in read_comments(tokens) if (marker := _classify(comment, file))):
        _check_place(marker, opened, file)
        if marker.kind != "END":
            opened.append(marker)
            continue
        todo, opened = opened[0], []
        first, last = todo.line + 2, marker.line - 1
        inside = lines_inside_strings(tokens)
        lines = enumerate(text.split("\n")[:last], start=1)
        _check_body([line for n, line in lines if n >= first and n not in inside], todo, file)
        part = 1 + sum(region.id == todo.id for region in regions)
        body = take_body(text, first, last, todo.indent, tokens)
        regions.append(Region(file, todo.id, part, todo.line, marker.line, todo.indent, todo.text, body))
    if opened:
        missing = f"'# {'END' if len(opened) == 2 else 'BEGIN'} SOLUTION {opened[0].id}'"
        raise InputError(f"{file}:{opened[-1].line}: expected {missing} below, got the file's end")
    return tuple(regions)


def _classify(comment: Comment, file: str) -> _Marker | None:
    """The marker that a comment is, None for an ordinary comment; a near miss is an error."""
    where = f"{file}:{comment.line}"
    for kind, pattern in _MARKERS.items():
        if match := pattern.fullmatch(comment.text):
            if not comment.alone:
                raise InputError(f"{where}: expected the marker on a line of its own, got it after code")
            return _Marker(kind, match[1], match[2], comment.line, comment.indent)
    if _NEARLY.search(comment.text):
        raise InputError(
            f"{where}: {comment.text!r} looks like a region marker but is not one; "
            f"write exactly {_SPELLING}, or word the comment differently"
        )
    return None


def _check_place(marker: _Marker, opened: list[_Marker], file: str) -> None:
    """TODO, then BEGIN on the next line, then END: same id, same indent, nothing nested."""
    where = f"{file}:{marker.line}"
    if "\t" in marker.indent:
        raise InputError(f"{where}: expected spaces before a marker, got a tab; indent with spaces")
    expected, got = ("TODO", "BEGIN", "END")[len(opened)], f"{marker.kind} {marker.id}"
    if marker.kind != expected:
        inside = f" inside region {opened[0].id} of line {opened[0].line}" if opened else ""
        raise InputError(f"{where}: expected {expected}, got {got}{inside}; the order is TODO, BEGIN, END")
    if not opened:
        return
    above = opened[-1]
    if marker.id != above.id:
        raise InputError(f"{where}: expected {expected} {above.id}, got {got}; a region has one id")
    if marker.indent != above.indent:
        raise InputError(f"{where}: expected the marker at the indent of line {above.line}, got another indent")
    if expected == "BEGIN" and marker.line != above.line + 1:
        raise InputError(f"{where}: expected BEGIN right below its TODO of line {above.line}; remove what is between")


def _check_body(lines: list[str], todo: _Marker, file: str) -> None:
    """At least one line of code, with spaces only, the first at the markers' indent and none left of it."""
    where = f"{file}:{todo.line}"
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    indents = [line[: len(line) - len(line.lstrip())] for line in code]
    if not code:
        raise InputError(f"{where}: expected at least one line of code in the region, got none")
    if any("\t" in indent for indent in indents):
        raise InputError(f"{where}: expected spaces in the region, got a tab; indent with spaces")
    if indents[0] != todo.indent or not all(indent.startswith(todo.indent) for indent in indents):
        raise InputError(f"{where}: expected the body at the indent of its markers, got a different indent")


def rewrite(text: str, regions: Iterable[Region], new_lines: Callable[[Region], list[str]]) -> str:
    """The text with the lines of each region, markers included, replaced by `new_lines(region)`."""
    lines = text.split("\n")
    for region in sorted(regions, key=lambda region: -region.line):  # from below, so that line numbers above stay true
        lines[region.line - 1 : region.end_line] = new_lines(region)
    return "\n".join(lines)


def for_students(content: bytes, file: str, course: Course, solved: Collection[str] = ()) -> bytes:
    """The handout's form of a file of the source: a lesson without its solutions, course.toml and Markdown without the
    staff's part.

    A file that is in this form already stays as it is.
    """
    if file.endswith((".toml", ".md")) and (staff_only := STAFF_ONLY.search(content)):
        return content[: staff_only.start()].rstrip() + b"\n"
    if file.endswith(".py") and b"# BEGIN SOLUTION" in content:
        return strip(content.decode(), file, course, solved).encode()
    return content


def strip(text: str, file: str, course: Course, solved: Collection[str] = ()) -> str:
    """The handout's form of a solved file.

    The solution of an id in `solved` stays, written where a student would write it. A region that the course does not
    have is no exercise: its lines become ordinary code, or an error where its lesson is left out (`Course.left_out`).
    """

    def handed_out(region: Region) -> list[str]:
        body = indent_body(region.body, region.indent, file)
        if region.id in course.left_out:
            return [f'{region.indent}raise NotImplementedError("{region.id} is not part of this course")']
        if region.id not in course.regions:
            return body
        todo = f"{region.indent}# TODO(cos598d) {region.id}: {region.todo}"
        lines = body if region.id in solved else [placeholder(region, course.readme(region.id))]
        return [todo, *lines, f"{region.indent}# END TODO {region.id}"]

    return rewrite(text, find_regions(text, file), handed_out)


def placeholder(region: Region, readme: str) -> str:
    """The line that stands for a body: it says what is missing and where to read, cut to fit the line length."""

    def line(words: str) -> str:
        message = json.dumps(f"TODO {region.id}: {words}; see {readme}", ensure_ascii=False)
        return f"{region.indent}raise NotImplementedError({message})"

    text = re.sub(r"\s*\(\d+ lines?\)$", "", region.todo)
    # From the longest to the shortest: all of it, up to each end of a clause outside brackets, then word by word.
    clauses = [text[: end.start()] for end in re.finditer(r"[;:,]? \(|[;:,] ", text)]
    whole_clauses = [clause for clause in reversed(clauses) if clause.count("(") == clause.count(")")]
    words = text.split(" ")
    cut = [" ".join([*words[:count], "..."]) for count in range(len(words) - 1, 0, -1)]
    lines = map(line, [text, *whole_clauses, *cut])
    return next((short for short in lines if len(short) <= _LONGEST_LINE), line(words[0]))


def replace_body(text: str, file: str, region_id: str, body: str, part: int | None = None) -> str:
    """Put `body` (at column 0) into a region of a solved file's text; the markers stay.

    Raises:
        InputError: no such region in the file, or several parts and `part` not given.
    """
    chosen = [region for region in find_regions(text, file) if region.id == region_id and part in (None, region.part)]
    if len(chosen) != 1:
        of_part = "" if part is None else f", part {part}"
        raise InputError(f"{file}: expected one region {region_id}{of_part}, got {len(chosen)}; name the file and part")

    def replaced(region: Region) -> list[str]:
        lines = text.split("\n")
        top, bottom = lines[region.line - 1 : region.line + 1], lines[region.end_line - 1]
        return [*top, *indent_body(body, region.indent, f"{file}, new body of {region_id}"), bottom]

    return rewrite(text, chosen, replaced)
