"""Tests that only show that something is not there: they run last in their region, and count beside passed ones."""

import pytest

from staff.proofs import grading_pool
from tests.pipeline import test_schedule

pytestmark = pytest.mark.medium

GRADERS = """
import pytest

graded = pytest.mark.graded

@graded("1.1", absence=True)
def test_nothing_is_imported(): pass

@graded("1.1", weight=2)
def test_the_model_is_loaded(): assert False

@graded("1.2", absence=True)
def test_nothing_is_sent(): assert False

@graded("1.2", weight=2)
def test_backward_runs(): pass

@graded("1.3", absence=True)
def test_nothing_else_is_called(): pass

@graded("1.3")
def test_the_optimizer_steps(): pass
"""


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """What the real plugin makes of these tests, in the order in which they ran."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "conftest.py").write_text("pytest_plugins = ['grader.plugin']\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (folder / "test_a.py").write_text(GRADERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(grading_pool, "ROOT", folder)
        return grading_pool.grade(folder, ["test_a.py"], 1)


def test_a_test_of_absence_runs_after_the_others_of_its_region_and_counts_with_them(graded):
    assert list(graded.statuses.items()) == [
        ("test_the_model_is_loaded", "crashed"), ("test_nothing_is_imported", "skipped"),
        ("test_backward_runs", "passed"), ("test_nothing_is_sent", "crashed"),
        ("test_the_optimizer_steps", "passed"), ("test_nothing_else_is_called", "passed"),
    ]  # fmt: skip
    assert "1.3" not in graded.points_lost


def test_a_test_of_absence_gives_nothing_while_another_test_of_its_region_fails(graded):
    assert graded.points_lost["1.1"] == 3
    assert graded.seen["test_nothing_is_imported"].message.startswith(
        "skipped: not counted yet: this test counts only when the other tests of region 1.1 pass; "
        "test_the_model_is_loaded has not passed"
    )


def test_what_a_test_of_absence_finds_does_not_take_the_other_tests_points(graded):
    assert graded.points_lost["1.2"] == 1


def test_two_nested_loops_earn_nothing():
    """They name every pair once and in order: all tests of the schedule that they pass count beside the others only."""
    marks = [mark for test in vars(test_schedule).values() for mark in getattr(test, "pytestmark", ())]

    alone = [mark for mark in marks if not mark.kwargs.get("absence")]
    assert len(alone) == 1 < len(marks)
