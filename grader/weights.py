"""Divides a region's points among its tests.

course.toml alone says how many points a region has. A test has a weight, 1 unless its mark says more:
`@graded("x.1", weight=2)`. A region gives floor(points x weight of the tests that passed / weight of all its tests),
so only all tests give all points.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path

from course.graded_tests import GradedTest, graded_tests
from course.table import Course
from grader.report import Entry


class Weights:
    """The weights of all graded tests, those included that a run leaves out. Ids are pytest's: `file::test`."""

    def __init__(self, root: Path, course: Course) -> None:
        self.tests = graded_tests(root, course)

    def take(self, course: Course, collected: Mapping[str, GradedTest]) -> None:
        """Take the tests of a run. Those in files that the table does not list are hidden: each weighs so much that at
        least one point of its region is its own."""
        hidden = {id: mark for id, mark in collected.items() if id.partition("[")[0] not in self.tests}
        for region in {mark.region for mark in hidden.values()}:
            marks = {id: mark for id, mark in hidden.items() if mark.region == region}
            spare = max(1, course.regions[region].points - len(marks))
            weight = max(math.ceil(self.of_region(region) / spare), *(mark.weight for mark in marks.values()))
            hidden |= {id: mark._replace(weight=weight) for id, mark in marks.items()}
        self.tests |= {**collected, **hidden}

    def of_region(self, region: str) -> int:
        return sum(test.weight for test in self.tests.values() if test.region == region)

    def set_points(self, course: Course, entries: Iterable[Entry]) -> None:
        """Set the points of these tests. Those of a region add up to what it gives.

        A test is worth the difference of two running sums, each rounded down: three tests of one weight divide 5 points
        into 1, 2 and 2, since 5/3, 10/3 and 15/3 are 1, 3 and 5.
        """
        by_region: dict[str, list[Entry]] = {}
        for entry in entries:
            by_region.setdefault(entry.region, []).append(entry)
        for region, tests in by_region.items():
            points, whole = course.regions[region].points, self.of_region(region)
            sums = accumulate((self.tests[entry.id].weight for entry in tests), initial=0)
            for entry, (before, after) in zip(tests, pairwise(sums), strict=True):
                entry.max_points = points * after // whole - points * before // whole
            passed = [entry for entry in tests if entry.status == "passed"]
            left = points * sum(self.tests[entry.id].weight for entry in passed) // whole
            for entry in tests:
                entry.points = min(entry.max_points, left) if entry.status == "passed" else 0
                left -= entry.points
            if passed:
                passed[-1].points += left  # the others could not take it, since their weights do not divide the points
