"""Every text that a student reads, as sentences: README files, docstrings, comments and the help of flags."""

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_CODE = re.compile(r"`[^`]*`")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?:])(?:\*\*|\))?\s+(?=[\"*`([]*[A-Z0-9\[])")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.|\[\d+\]|[0-9a-z]{1,2}\.\d)\s+")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


class Sentence(NamedTuple):
    """One sentence of a text, with its file and the line on which its paragraph begins."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> int:
        """Number of words. A piece of code in backquotes is one word; punctuation and signs are none."""
        return sum(bool(re.search(r"\w", word)) for word in _CODE.sub("code", self.text).split())


def sentences_of(path: Path, name: str) -> list[Sentence]:
    """Return the sentences of a Markdown or Python file; of a table every cell is a text of its own."""
    text = path.read_text(encoding="utf-8")
    paragraphs = _of_python(path, text) if path.suffix == ".py" else _of_markdown(text)
    return [
        Sentence(name, line, sentence.strip())
        for line, paragraph in paragraphs
        for sentence in _END_OF_SENTENCE.split(" ".join(paragraph.split()))
        if sentence.strip()
    ]


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every paragraph, list item, heading and cell; code blocks are left out."""
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    return _paragraphs(enumerate(text.splitlines(), 1))


def _of_python(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, every comment and every `help=` of a flag."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            lines = (ast.get_docstring(node) or "").splitlines()
            yield from _paragraphs(enumerate(_without_drawings(lines), docstring.lineno))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "help":
                    parts = [part.value for part in ast.walk(keyword.value) if isinstance(part, ast.Constant)]
                    yield node.lineno, " ".join(str(part) for part in parts)
    with open(path, "rb") as file:
        comments = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    yield from _paragraphs((token.start[0], token.string.lstrip("# ")) for token in comments)


def _without_drawings(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring; an indented block after an empty line is a drawing or a command, and left empty."""
    drawing, before = False, ""
    for line in lines:
        if line.strip():
            drawing = line.startswith("    ") and (drawing or not before.strip()) and not _ITEM.match(line)
        yield "" if drawing else line
        before = line


def _paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join consecutive lines; an empty line, a list item, a heading and a row of a table begin a new paragraph."""
    start, words, last = 0, "", -1
    for number, line in lines:
        table = line.startswith("|")
        if not line.strip() or table or line.startswith("#") or _ITEM.match(line) or number > last + 1:
            yield start, words
            start, words = number, ""
        if table:
            yield from ((number, cell) for cell in line.strip("|").split("|") if not set(cell) <= set(" -"))
        else:
            words += " " + _ITEM.sub("", line)
        last = number
    yield start, words
