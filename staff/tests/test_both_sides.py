"""The handout from both sides: what is open is not attempted, what is solved passes, and nothing else changes."""

import json
import subprocess
import sys

import pytest

from common.paths import ROOT
from course.table import load_course
from staff import both_sides
from staff.proofs.grading_pool import Test as Grader

ALL = set(load_course().regions)
TESTS = {
    "test_join": Grader("t.py::test_join", "run_glue.py", "2a.1"),
    "test_share": Grader("t.py::test_share", "run_glue.py", "2a.2"),
    "test_ladder": Grader("t.py::test_ladder", "run_glue.py", "2a.3", ("2a.1", "2a.2")),
}


def test_a_region_builds_on_what_its_tests_build_on():
    assert both_sides.with_needs("2a.3", TESTS) == {"2a.3", "2a.1", "2a.2", "1.2", "1.3"}


@pytest.mark.parametrize(
    "statuses, unexpected",
    [
        (("not attempted", "passed", "skipped"), []),
        (("not attempted", "passed", "passed"), []),  # it can do without
        (("crashed", "passed", "skipped"), ["test_join"]),
        (("not attempted", "skipped", "skipped"), ["test_share"]),
        (("not attempted", "passed", "wrong"), ["test_ladder"]),
    ],
)
def test_while_a_region_is_open_only_its_tests_and_those_that_build_on_it_may_change(statuses, unexpected):
    lines = both_sides.unexpected(ALL - {"2a.1"}, TESTS, dict(zip(TESTS, statuses, strict=True)))

    assert [line.split(" ")[0] for line in lines] == unexpected


@pytest.mark.parametrize(
    "status, right",
    [("passed", True), ("skipped", False), ("wrong", False), ("not attempted", False)],
)
def test_once_it_is_solved_its_tests_pass_and_all_others_are_not_attempted(status, right):
    statuses = {"test_join": status, "test_share": "not attempted", "test_ladder": "not attempted"}

    assert (both_sides.unexpected({"2a.1"}, TESTS, statuses) == []) == right


@pytest.mark.parametrize(
    "regions", [pytest.param(["2a.3"], marks=pytest.mark.proof), pytest.param([], marks=pytest.mark.slow)]
)
def test_a_region_and_all_of_them_from_both_sides(regions):
    words = ["--region", *regions] if regions else []
    run = subprocess.run([sys.executable, "-m", "staff.both_sides", *words], cwd=ROOT, capture_output=True, text=True)

    count = len(regions or ALL)
    assert run.stdout, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {"regions": count, "open": count, "solved": count}, run.stdout


WITH_ABSENCE = {
    "test_wrap": Grader("t.py::test_wrap", "run.py", "3.2", needs=("1.2",)),
    "test_imports": Grader("t.py::test_imports", "run.py", "3.2", absence=True),
}


@pytest.mark.parametrize("opened, right", [("1.2", True), ("1.1", False)])
def test_a_test_of_absence_may_wait_for_what_the_others_of_its_region_build_on(opened, right):
    statuses = {"test_wrap": "skipped" if right else "passed", "test_imports": "skipped"}

    assert (both_sides.unexpected(ALL - {opened}, WITH_ABSENCE, statuses) == []) == right
