"""Tests that only show that something is not there: they run last in their region, and count beside passed ones."""

import json
import os

import pytest

from common.paths import ROOT
from tests.own.started_processes import run
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
def tests(tmp_path_factory):
    """The report's tests by name, in the order in which they ran with the real plugin."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "conftest.py").write_text("pytest_plugins = ['grader.plugin']\n")
    (folder / "test_a.py").write_text(GRADERS)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run("-m", "pytest", "-q", "--report", "report.json", "test_a.py", cwd=folder, env=environment)
    tests = json.loads((folder / "report.json").read_text())["tests"]
    return {test["id"].rpartition("::")[2]: test for test in tests}


def test_a_test_of_absence_runs_after_the_others_of_its_region_and_counts_with_them(tests):
    assert list(tests) == [
        "test_the_model_is_loaded", "test_nothing_is_imported", "test_backward_runs", "test_nothing_is_sent",
        "test_the_optimizer_steps", "test_nothing_else_is_called",
    ]  # fmt: skip
    of_1_3 = [tests[name] for name in ("test_the_optimizer_steps", "test_nothing_else_is_called")]
    assert all(test["status"] == "passed" and test["points"] == test["max_points"] > 0 for test in of_1_3)


def test_a_test_of_absence_gives_nothing_while_another_test_of_its_region_fails(tests):
    absence = tests["test_nothing_is_imported"]

    assert (absence["status"], absence["points"]) == ("skipped", 0)
    assert absence["message"] == (
        "not counted yet: this test counts only when the other tests of region 1.1 pass; test_the_model_is_loaded has "
        "not passed"
    )


def test_what_a_test_of_absence_finds_is_said_even_where_it_cannot_count(tests):
    assert tests["test_nothing_is_sent"]["status"] == "crashed"
    assert tests["test_backward_runs"]["points"] == 2, "and it does not take the other tests' points"


def test_two_nested_loops_earn_nothing():
    """They name every pair once and in order: all tests of the schedule that they pass count beside the others only."""
    marks = [mark for test in vars(test_schedule).values() for mark in getattr(test, "pytestmark", ())]

    alone = [mark for mark in marks if not mark.kwargs.get("absence")]
    assert len(alone) == 1 < len(marks)
