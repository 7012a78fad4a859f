"""Finds a student's own lines in a file of the student version: between a TODO line and its END TODO line.

        # TODO(cos598d) 1.2: what to do
        raise NotImplementedError("TODO 1.2: ...")      <- replaced by the student
        # END TODO 1.2

The END TODO line is a comment and does nothing. It is there because a student may write any number of lines, so that
only a line of our own can say where they stop. `python submit.py carry` copies the lines between the two.
"""

import functools
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import InputError

REGION_ID = r"[0-9a-z]+\.[0-9]+"
_TODO = re.compile(rf"#\s*TODO\([a-z0-9]+\)\s+({REGION_ID})\b.*")
_END_TODO = re.compile(rf"#\s*END TODO\s+({REGION_ID})\s*")
_STRING_STARTS = {tokenize.STRING, getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "TSTRING_START", -1)}
_STRING_ENDS = {tokenize.STRING, getattr(tokenize, "FSTRING_END", -1), getattr(tokenize, "TSTRING_END", -1)}


class Comment(NamedTuple):
    """A real comment (never text inside a string); `line` counts from 1."""

    line: int
    indent: str
    text: str
    alone: bool


@dataclass(frozen=True)
class Block:
    """The lines that a student wrote for one TODO. A TODO may have several parts in one file, numbered from 1.

    `line` and `end_line` are those of the TODO and the END TODO line; `body` is without the block's own indent.
    """

    id: str
    part: int
    line: int
    end_line: int
    indent: str
    body: str

    @property
    def attempted(self) -> bool:
        """Return whether there is more than blank lines, comments and the line that the student version has there."""
        placeholder = f'raise NotImplementedError("TODO {self.id}:'
        lines = [line.strip() for line in self.body.splitlines()]
        return any(line and not line.startswith(("#", placeholder)) for line in lines)


def read_tokens(text: str, file: str) -> list[tokenize.TokenInfo]:
    """Python's tokens; an InputError with file and line if the text is not valid Python."""
    try:
        return list(tokenize.generate_tokens(io.StringIO(text).readline))
    except tokenize.TokenError as error:
        line, reason = error.args[1][0], error.args[0]
    except SyntaxError as error:
        line, reason = error.lineno, error.msg
    raise InputError(f"{file}:{line}: expected Python, got something that cannot be read ({reason}); fix it first")


def read_comments(tokens: Iterable[tokenize.TokenInfo]) -> list[Comment]:
    """The comments of a file, in order."""
    comments = []
    for token in tokens:
        if token.type == tokenize.COMMENT:
            before = token.line[: token.start[1]]
            comments.append(Comment(token.start[0], before, token.string, not before.strip()))
    return comments


def lines_inside_strings(tokens: Iterable[tokenize.TokenInfo]) -> set[int]:
    """Lines (from 1) that begin inside a string: changing their indent would change the string."""
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokens:
        if token.type in _STRING_STARTS:
            opened.append(token.start[0])
        if token.type in _STRING_ENDS:
            inside.update(range(opened.pop() + 1, token.end[0] + 1))
    return inside


def take_body(text: str, first: int, last: int, indent: str, tokens: Iterable[tokenize.TokenInfo]) -> str:
    """Lines `first` to `last` (from 1, inclusive) without `indent`; text inside a string does not change."""
    keep = lines_inside_strings(tokens)
    lines = text.split("\n")[first - 1 : last]
    return "\n".join(
        line if number in keep else line.removeprefix(indent) if line.startswith(indent) else line.lstrip()
        for number, line in enumerate(lines, start=first)
    )


def indent_body(body: str, indent: str, file: str = "body") -> list[str]:
    """The lines of a body that starts at column 0, moved to `indent`; the reverse of take_body."""
    keep = lines_inside_strings(read_tokens(body, file))
    lines = body.strip("\n").split("\n")
    offset = len(body) - len(body.lstrip("\n")) + 1
    return [
        line if number in keep or not line.strip() else indent + line for number, line in enumerate(lines, start=offset)
    ]


def find_blocks(text: str, file: str = "file") -> list[Block]:
    """Every TODO of a student's file with the lines written for it.

    Raises:
        InputError: the file is not valid Python, or a TODO has lost its END TODO line (or the other way round).
    """
    return list(_find_blocks(text, file))


@functools.lru_cache(maxsize=64)  # one grading asks several times for the same files, and reading one takes 10 ms
def _find_blocks(text: str, file: str) -> tuple[Block, ...]:
    tokens = read_tokens(text, file)
    blocks: list[Block] = []
    todo: Comment | None = None
    todo_id = ""
    for comment in read_comments(tokens):
        start, end = _TODO.fullmatch(comment.text), _END_TODO.fullmatch(comment.text)
        if start:
            if todo:
                break  # the TODO above has no END: reported below
            todo, todo_id = comment, start[1]
        elif end and todo and end[1] == todo_id:
            body = take_body(text, todo.line + 1, comment.line - 1, todo.indent, tokens)
            part = 1 + sum(block.id == todo_id for block in blocks)
            blocks.append(Block(todo_id, part, todo.line, comment.line, todo.indent, body))
            todo = None
        elif end:
            raise InputError(
                f"{file}:{comment.line}: END TODO {end[1]} has no TODO line above; put it back from the student version"
            )
    if todo:
        raise InputError(
            f"{file}:{todo.line}: TODO {todo_id} has no line '# END TODO {todo_id}' below; put it under your last line"
        )
    return tuple(blocks)


def replace_block(text: str, block: Block, body: str) -> str:
    """The text with `body` (at column 0) in place of what the block holds; TODO and END TODO lines stay."""
    lines = text.split("\n")
    lines[block.line : block.end_line - 1] = indent_body(body, block.indent)
    return "\n".join(lines)
