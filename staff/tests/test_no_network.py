"""A machine that can give ranks no network of their own: what needs one is not run, and everybody is told so."""

import csv
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from common.paths import ROOT
from course.table import NOT_GRADED_HERE, load_course
from staff.grade import gradebook, result_store
from staff.grade.submissions import write_files
from staff.gradescope import classroom50, results
from staff.proofs.bank import solved_files
from staff.sandbox import kernel

pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up the right to make namespaces"),
]

COURSE = load_course()
DROP_FROM_BOUNDING_SET, SYS_ADMIN = 24, 21  # of prctl(2), capabilities(7)
FILE = "tests/start/test_start.py"
SCRIPT = f"{FILE}::test_the_script_trains_on_two_workers"
OTHERS = [
    f"{FILE}::test_every_worker_is_started_and_waited_for",
    f"{FILE}::test_task2b_imports_only_what_the_course_allows",
]


def without_namespaces(*words: str | Path) -> str:
    """What a command prints where it may make none, as in a container."""
    process = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: kernel.prctl(DROP_FROM_BOUNDING_SET, SYS_ADMIN),
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_an_instructor_learns_before_the_term_which_points_cannot_be_graded():
    lines = without_namespaces("staff.sandbox", "--probe").splitlines()

    assert any(line.startswith(NOT_GRADED_HERE) and SCRIPT in line and "2b.9, points: 1" in line for line in lines)
    assert len(json.loads(lines[-1])["not_graded_here"]) == 1


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a solution whose script says so if it is run."""
    folder = tmp_path_factory.mktemp("class")
    write_files(solved_files(), folder / "alice")
    printed = without_namespaces("staff.grade", folder / "alice", "--out", folder / "out", "--tests", SCRIPT, *OTHERS)
    assert f"{NOT_GRADED_HERE}: {SCRIPT}" in printed
    return folder / "out"


def test_the_script_is_not_run_and_the_other_tests_of_its_region_are(graded):
    tests = {test["id"]: test for test in result_store.read(graded, "alice").tests}

    assert tests[SCRIPT]["status"] == NOT_GRADED_HERE and tests[SCRIPT]["points"] == 0
    assert {tests[id]["status"] for id in OTHERS} == {"passed"}


def test_the_students_page_and_the_grade_book_say_which_points_are_missing(graded):
    page = (graded / "hand_ins/alice/index.html").read_text()
    (row,) = csv.DictReader((graded / "gradebook.csv").read_text().splitlines())

    assert "2 of 3 points, 1 not graded here" in page and "cannot create one" in page
    assert "2 of 3 points, 1 not graded here" in (graded / "index.html").read_text()
    assert (row["score"], row["max_score"], row[NOT_GRADED_HERE]) == ("2", "3", "1")


def test_gradescope_and_classroom_50_say_it(graded):
    row = result_store.read(graded, "alice")
    content = results.results(row, COURSE, None, 1.0)
    runner = dict.fromkeys((names[0] for names in classroom50.TEXTS.values()), "submit")

    assert content["output"].startswith("2 of 3 points, 1 not graded here.")
    assert any(test["output"].startswith(NOT_GRADED_HERE) and test["score"] == 0 for test in content["tests"])
    result = classroom50.result(row, runner, datetime.now())
    assert [test["test-name"].endswith(f"({NOT_GRADED_HERE})") for test in result["tests"]].count(True) == 1


def test_it_is_neither_a_mistake_nor_a_region_that_was_not_tried(graded):
    row = result_store.read(graded, "alice")

    (share,) = gradebook.regions([row], COURSE)
    assert gradebook.mistakes([row]) == [] and (share.full, share.max_points) == (1, 2)
