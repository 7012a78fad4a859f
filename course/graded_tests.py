"""Reads which tests grade which region, and their weights, from the test files, which are not run."""

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from course.table import Course


class GradedTest(NamedTuple):
    """The mark of a test: `@graded("2a.3", weight=2)`; grader/plugin.py says what it means."""

    region: str
    weight: int = 1
    needs: Sequence[str] = ()
    absence: bool = False
    network: bool = False


def graded_tests(root: Path, course: Course) -> dict[str, GradedTest]:
    """Return all graded tests in the files of the course's table, by pytest's id, `file::test`."""
    files = {file for task in course.tasks.values() for file in (*task.tests, *task.whole)}
    files |= {file for region in course.regions.values() for file in region.tests}
    there = [file for file in sorted(files) if (root / file).is_file()]
    return {id: GradedTest(*values, **words) for file in there for id, values, words in marked(root, file, "graded")}


def marked(root: Path, file: str, name: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Return the id of each test of a file that is marked `@name(...)`, and the mark's arguments."""
    return ((f"{file}::{test}", values, words) for test, values, words in _marked((root / file).read_bytes(), name))


@functools.lru_cache(maxsize=128)  # a class or a bank reads the same files for each tree
def _marked(source: bytes, name: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
    tests = []
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).rpartition(".")[2] == name:
                    values = [ast.literal_eval(value) for value in mark.args]
                    words = {str(word.arg): ast.literal_eval(word.value) for word in mark.keywords}
                    tests.append((function.name, values, words))
    return tests
