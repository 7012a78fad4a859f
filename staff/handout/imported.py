"""Finds what files of the course import of each other, so that a course without some of its tasks is still complete."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def with_imports(root: Path, files: Iterable[str]) -> list[str]:
    """Return the files, and those that they import at their top, directly or not; sorted.

    Of tests, the whole folder: beside a test file stands what it shares, and reads by name. An import inside a function
    is left alone: it is made for a script that is there.
    """
    todo, found = list(files), set[str]()
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += _imports(root, file) if file.endswith(".py") else []
    return sorted(found)


def _imports(root: Path, file: str) -> Iterator[str]:
    try:
        body = ast.parse((root / file).read_bytes()).body
    except SyntaxError:  # leaks.py says so
        return
    for module in _modules(body):
        path = Path(*module.split(".")).with_suffix(".py")
        if (root / path).is_file():
            folder = path.parent.as_posix()
            is_shared = folder.startswith("tests/")
            yield from (
                [f"{folder}/{one.name}" for one in (root / folder).glob("*.py")] if is_shared else [path.as_posix()]
            )


def _modules(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The modules that these statements may import when they run."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from _modules(node.body)
