"""The handout from both sides: what is open is not attempted, what is solved passes, and nothing else changes."""

import json
import subprocess
import sys

import pytest

from common.paths import ROOT
from course.table import load_course
from staff import both_sides
from staff.proofs.grading_pool import Test as Grader

TESTS = {
    "test_join": Grader("t.py::test_join", "run_glue.py", "2a.1"),
    "test_share": Grader("t.py::test_share", "run_glue.py", "2a.2"),
    "test_ladder": Grader("t.py::test_ladder", "run_glue.py", "2a.3", ("2a.1", "2a.2")),
}


def sides(*arguments):
    command = [sys.executable, "-m", "staff.both_sides", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_a_region_builds_on_what_its_tests_build_on():
    assert both_sides.with_needs("2a.3", TESTS) == {"2a.3", "2a.1", "2a.2", "1.2", "1.3"}


@pytest.mark.parametrize(
    "statuses",
    [
        ("not attempted", "passed", "skipped"),
        ("not attempted", "passed", "passed"),  # it can do without
    ],
)
def test_while_a_region_is_open_only_its_tests_and_those_that_build_on_it_may_change(statuses):
    assert both_sides.wrong_when_open("2a.1", TESTS, dict(zip(TESTS, statuses, strict=True))) == []


@pytest.mark.parametrize(
    "statuses, named",
    [
        (("crashed", "passed", "skipped"), "test_join"),
        (("not attempted", "skipped", "skipped"), "test_share"),
        (("not attempted", "passed", "wrong"), "test_ladder"),
    ],
)
def test_any_other_change_is_named(statuses, named):
    (line,) = both_sides.wrong_when_open("2a.1", TESTS, dict(zip(TESTS, statuses, strict=True)))

    assert line.startswith(named)


@pytest.mark.parametrize(
    "status, right",
    [("passed", True), ("skipped", False), ("wrong", False), ("not attempted", False)],
)
def test_once_it_is_solved_its_tests_pass_and_all_others_are_not_attempted(status, right):
    seen = {"test_join": status, "test_share": "not attempted", "test_ladder": "not attempted"}

    assert (both_sides.wrong_when_solved({"2a.1"}, TESTS, seen) == []) == right


@pytest.mark.proof
def test_the_last_region_of_task_2a_from_both_sides():
    figures, said = sides("--region", "2a.3")

    assert figures == {"regions": 1, "open": 1, "solved": 1}, said


@pytest.mark.slow
def test_every_region_from_both_sides():
    count = len(load_course().regions)

    figures, said = sides()

    assert figures == {"regions": count, "open": count, "solved": count}, said


WITH_ABSENCE = {
    "test_wrap": Grader("t.py::test_wrap", "run.py", "3.2", needs=("1.2",)),
    "test_imports": Grader("t.py::test_imports", "run.py", "3.2", absence=True),
}


@pytest.mark.parametrize("opened, right", [("1.2", True), ("1.1", False)])
def test_a_test_of_absence_may_wait_for_what_the_others_of_its_region_build_on(opened, right):
    seen = {"test_wrap": "skipped" if right else "passed", "test_imports": "skipped"}

    assert (both_sides.wrong_when_open(opened, WITH_ABSENCE, seen) == []) == right
