"""A region's points are those of course.toml, whatever the weights of its tests."""

from dataclasses import replace

import pytest

from common.paths import ROOT
from course.table import load_course
from grader.report import Entry
from grader.weights import Weights

COURSE = load_course()
FILE = """
import pytest
graded = pytest.mark.graded

@graded("1.2", weight=2)
def test_a(grade): ...

@pytest.mark.graded("1.2", absence=True)
def test_b(grade): ...

@graded("1.2")
def test_c(grade): ...

def test_of_nothing(): ...
"""


@pytest.fixture
def weights(tmp_path):
    """Three tests of 1.2, of the weights 2, 1 and 1."""
    file = COURSE.tasks["1"].tests[0]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(FILE)
    return Weights(tmp_path, COURSE)


def course_with(points):
    """The course, in which 1.2 has so many points."""
    return replace(COURSE, regions=COURSE.regions | {"1.2": replace(COURSE.regions["1.2"], points=points)})


def share(weights, points, passed):
    """Points and most points of the tests, of which some passed, where the region has so many points."""
    status = ["passed" if ok else "wrong" for ok in passed]
    entries = [Entry(id, "1", "1.2", status[k], 0, 0, "") for k, id in enumerate(weights.tests) if k < len(passed)]
    weights.share_out(course_with(points), entries)
    return [entry.points for entry in entries], [entry.max_points for entry in entries]


def test_marks_are_read_from_files_that_are_not_run(weights):
    assert [id.rpartition("::")[2] for id in weights.tests] == ["test_a", "test_b", "test_c"]
    assert weights.of_region("1.2") == 4


@pytest.mark.parametrize("points", [1, 2, 3, 4, 5, 7, 11])
def test_a_region_gives_its_share_rounded_down_and_all_points_for_all_tests_only(weights, points):
    for number in range(8):
        passed = [bool(number >> k & 1) for k in range(3)]
        got, most = share(weights, points, passed)
        weight = sum(w for w, ok in zip((2, 1, 1), passed, strict=True) if ok)
        assert sum(most) == points
        assert sum(got) == points * weight // 4
        assert all(got[k] == 0 for k in range(3) if not passed[k])


def test_a_part_of_the_tests_can_only_give_its_part(weights):
    entry = Entry(next(iter(weights.tests)), "1", "1.2", "passed", 0, 0, "")
    weights.share_out(
        replace(COURSE, regions=COURSE.regions | {"1.2": replace(COURSE.regions["1.2"], points=3)}), [entry]
    )

    assert (entry.points, entry.max_points) == (1, 1)


def test_every_region_of_the_course_has_tests():
    weights = Weights(ROOT, COURSE)

    assert [id for id in COURSE.regions if not weights.of_region(id)] == []
