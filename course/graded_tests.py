"""Reads which tests grade which region, and their weights, from the test files, which are not run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from course.table import Course


class GradedTest(NamedTuple):
    """The mark of a test: `@graded("2a.3", weight=2)`. Its weight is 1 unless the mark says more."""

    region: str
    weight: int


def graded_tests(root: Path, course: Course) -> dict[str, GradedTest]:
    """Return all graded tests in the files of the course's table, by pytest's id, `file::test`."""
    files = {file for task in course.tasks.values() for file in (*task.tests, *task.whole)}
    files |= {file for region in course.regions.values() for file in region.tests}
    return dict(test for file in sorted(files) if (root / file).is_file() for test in _tests_in(root, file))


def _tests_in(root: Path, file: str) -> Iterator[tuple[str, GradedTest]]:
    for function in ast.parse((root / file).read_bytes()).body:
        if isinstance(function, ast.FunctionDef):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).rpartition(".")[2] == "graded":
                    given = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
                    region = ast.literal_eval(mark.args[0])
                    yield f"{file}::{function.name}", GradedTest(region, given.get("weight", 1))
