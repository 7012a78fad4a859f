"""Divides a region's points among its tests.

course.toml alone says how many points a region has. A test has a weight, 1 unless its mark says more:
`@graded("2a.3", weight=2)`. A region gives floor(points x weight of the tests that passed / weight of all its tests),
so only all tests give all points.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from course.table import Course
from grader.report import Entry


class Weights:
    """The weights of all graded tests, those included that a run leaves out. Ids are pytest's: `file::test`."""

    def __init__(self, root: Path, course: Course) -> None:
        """Read the marks in the test files of the course's table."""
        files = {file for task in course.tasks.values() for file in (*task.tests, *task.whole)}
        files |= {file for region in course.regions.values() for file in region.tests}
        self.tests = dict(mark for file in sorted(files) if (root / file).is_file() for mark in marks_in(root, file))

    def add(self, id: str, region: str, weight: int) -> None:
        """Take a test of another file, such as a hidden one."""
        self.tests[id] = region, weight

    def of_region(self, region: str) -> int:
        return sum(weight for of, weight in self.tests.values() if of == region)

    def share_out(self, course: Course, entries: Iterable[Entry]) -> None:
        """Set the points of these tests. Those of a region add up to what it gives."""
        by_region: dict[str, list[Entry]] = {}
        for entry in entries:
            by_region.setdefault(entry.region, []).append(entry)
        for region, tests in by_region.items():
            points, whole = course.regions[region].points, self.of_region(region)
            weight = passed = most = 0
            for entry in tests:
                weight += self.tests[entry.id][1]
                entry.max_points, most = points * weight // whole - most, points * weight // whole
                passed += self.tests[entry.id][1] * (entry.status == "passed")
            left = points * passed // whole
            for entry in tests:
                entry.points = min(entry.max_points, left) if entry.status == "passed" else 0
                left -= entry.points
            last = next((entry for entry in reversed(tests) if entry.status == "passed"), None)
            if last:
                last.points += left  # which others, of weights that do not divide the points, could not take


def marks_in(root: Path, file: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the id, region and weight of each graded test of a file, which is not run."""
    for function in ast.parse((root / file).read_bytes()).body:
        if isinstance(function, ast.FunctionDef):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).rpartition(".")[2] == "graded":
                    given = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
                    yield f"{file}::{function.name}", (ast.literal_eval(mark.args[0]), given.get("weight", 1))
