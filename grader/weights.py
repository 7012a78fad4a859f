"""Divides a region's points among its tests.

course.toml alone says how many points a region has. A test has a weight, 1 unless its mark says more:
`@graded("x.1", weight=2)`. A region gives floor(points x weight of the tests that passed / weight of all its tests),
so only all tests give all points.
"""

import math
from collections.abc import Iterable, Mapping
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

    def share_out(self, course: Course, entries: Iterable[Entry]) -> None:
        """Set the points of these tests. Those of a region add up to what it gives."""
        by_region: dict[str, list[Entry]] = {}
        for entry in entries:
            by_region.setdefault(entry.region, []).append(entry)
        for region, tests in by_region.items():
            points, whole = course.regions[region].points, self.of_region(region)
            weight = passed = most = 0
            for entry in tests:
                weight += self.tests[entry.id].weight
                entry.max_points, most = points * weight // whole - most, points * weight // whole
                if entry.status == "passed":
                    passed += self.tests[entry.id].weight
            left = points * passed // whole
            for entry in tests:
                entry.points = min(entry.max_points, left) if entry.status == "passed" else 0
                left -= entry.points
            last = next((entry for entry in reversed(tests) if entry.status == "passed"), None)
            if last:
                last.points += left  # the others could not take it, since their weights do not divide the points
