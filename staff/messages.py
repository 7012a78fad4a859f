"""Collects every error message that the handout's programs can print into docs/messages.md, by the file that prints it.

    python -m staff.messages [--check]

What is filled in at run time stands as <...>. A test keeps the page up to date.
"""

import argparse
import ast
import sys
from collections.abc import Iterator

from common.course import files_matching, load_course
from common.errors import exit_on_input_error
from common.paths import ROOT, atomic_write

PAGE = ROOT / "docs" / "messages.md"
HEAD = """# Error messages

Every message of the programs of this assignment, by the file that prints it; `<...>` stands for what is filled in. Each
says in one line what was expected, what came, and what to do next. A program that was given something wrong ends with
exit code 2; one that lost contact with another worker, or made no progress, with 3 (see "How it works" in
cluster/README.md). What the graders say about your code is not listed: they say it with your numbers and lines.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else "docs/messages.md: run python -m staff.messages")
    with atomic_write(PAGE) as file:
        file.write(page())
    print(f"{PAGE.relative_to(ROOT)}: {page().count(chr(10) + '- ')} messages")


def page() -> str:
    """The whole page, from the source of every file that ships."""
    sections = []
    for file in files_matching(ROOT, load_course().handout.ships):
        if file.endswith(".py") and not file.startswith("tests/"):
            found = sorted(set(messages((ROOT / file).read_text(encoding="utf-8"))))
            if found:
                sections.append("\n".join([f"\n## {file}\n", *(f"- {message}" for message in found)]))
    return HEAD + "\n".join(sections) + "\n"


def messages(source: str) -> Iterator[str]:
    """The message of every InputError that is made here, as Markdown."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="InputError"), args=[first, *_]):
                words = _words(first)
                if words.replace("<...>", "").strip(" :;,."):  # else it was worded elsewhere and is handed on
                    yield words.replace("\n", " ")


def _words(node: ast.AST) -> str:
    """A string expression as text, with <...> for everything that is not written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    return "<...>"


if __name__ == "__main__":
    exit_on_input_error(main)
