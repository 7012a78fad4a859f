"""Every text that a student reads, as sentences: README files, docstrings, comments, --help, errors, hints."""

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from common.paths import ROOT
from course.table import files_matching, load_course

# Texts that ship and have their own checks: the words of verdicts are those of the bank of mistakes.
_LEFT_OUT = ("grader/", "tests/")

_CODE = re.compile(r"`[^`]*`")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?:])(?:\*\*|\))?\s+(?=[\"*(\[]*[A-Z0-9\[`])")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.|\[\d+\]|\d?[0-9a-z]\.\d|\w+(?:, \w+)*:)\s+")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


class Sentence(NamedTuple):
    """One sentence of a text, with its file and the line on which its paragraph begins."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> int:
        """The number of words. Code in backquotes is one word; signs and punctuation are none."""
        return sum(bool(re.search(r"\w", word)) for word in _CODE.sub("code", self.text).split())


def student_sentences() -> list[Sentence]:
    """Return the sentences of everything that ships, hints included."""
    course = load_course()
    names = [name for name in files_matching(ROOT, course.handout.ships) if name.endswith((".md", ".py"))]
    found = [
        sentence
        for name in names
        if not name.startswith(_LEFT_OUT)
        for sentence in sentences_of((ROOT / name).read_text(encoding="utf-8"), name)
    ]
    for region in course.regions.values():
        for hint in region.hints:
            found += _sentences([(0, hint)], f"course.toml, hints of {region.id}")
    return found


def sentences_of(text: str, name: str) -> list[Sentence]:
    """Return the sentences of a Python or Markdown file; in a table, every cell is a text."""
    return _sentences(_of_python(text) if name.endswith(".py") else _of_markdown(text), name)


def _sentences(paragraphs: Iterable[tuple[int, str]], name: str) -> list[Sentence]:
    return [
        Sentence(name, line, sentence.strip())
        for line, paragraph in paragraphs
        for sentence in _END_OF_SENTENCE.split(" ".join(paragraph.split()))
        if sentence.strip()
    ]


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every paragraph, list item, heading and cell; code blocks are left out."""
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    return _paragraphs(enumerate(text.split("\n"), 1))


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring, every comment, every `help=` of a flag and every message of an error."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines = (ast.get_docstring(node, clean=False) or "").split("\n")
            indent = " " * node.body[0].col_offset
            lines = [line.removeprefix(indent) for line in lines]
            yield from _paragraphs(enumerate(_without_drawings(lines), node.body[0].lineno))
        elif isinstance(node, ast.Call):
            shown = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
            shown += node.args if getattr(node.func, "id", "").endswith("Error") else []
            yield from ((node.lineno, _words_of(value)) for value in shown)
    yield from _comments(text)


def _words_of(value: ast.expr) -> str:
    """Return the text of a string or f-string; a value that it fills in is one word."""
    parts = value.values if isinstance(value, ast.JoinedStr) else [value]
    return "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X" for part in parts
    )


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments, those on consecutive lines of their own as one; solutions do not ship, so theirs are left out."""
    lines, solution = [], False
    for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            solution = "BEGIN SOLUTION" in words or (solution and "END SOLUTION" not in words)
            if not token.line.lstrip().startswith("#"):
                words = f"- {words}"  # after code: a separate text
            if not solution:
                lines.append((token.start[0], words))
    return _paragraphs(lines)


def _without_drawings(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a docstring, empty ones for a drawing: an indented block after an empty line."""
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
