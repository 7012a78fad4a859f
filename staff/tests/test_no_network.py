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
OTHER = f"{FILE}::test_every_worker_is_started_and_waited_for"


def without_namespaces(*words: str | Path) -> str:
    """What a command prints where it may make none, as in a container."""
    process = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True,
        preexec_fn=lambda: kernel.prctl(DROP_FROM_BOUNDING_SET, SYS_ADMIN),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_an_instructor_learns_before_the_term_which_points_cannot_be_graded():
    lines = without_namespaces("staff.sandbox", "--probe").splitlines()

    assert any(line.startswith(NOT_GRADED_HERE) and SCRIPT in line and "2b.9, points: 1" in line for line in lines)
    assert len(json.loads(lines[-1])["not_graded_here"]) == 1


def test_the_script_is_not_run_the_other_tests_of_its_region_are_and_everybody_reads_which_points_are_missing(tmp_path):
    write_files(solved_files(), tmp_path / "alice")
    out = tmp_path / "out"
    printed = without_namespaces("staff.grade", tmp_path / "alice", "--out", out, "--tests", SCRIPT, OTHER)

    row = result_store.read(out, "alice")
    (line,) = csv.DictReader((out / "gradebook.csv").read_text().splitlines())
    assert f"{NOT_GRADED_HERE}: {SCRIPT}" in printed
    assert {test["id"]: (test["status"], test["points"]) for test in row.tests} == {
        SCRIPT: (NOT_GRADED_HERE, 0), OTHER: ("passed", 1)
    }  # fmt: skip
    assert (line["score"], line["max_score"], line[NOT_GRADED_HERE]) == ("1", "2", "1")
    for page in (out / "hand_ins/alice/index.html", out / "index.html"):
        assert "1 of 2 points, 1 not graded here" in page.read_text()
    content = results.results(row, COURSE, None, 1.0)
    assert content["output"].startswith("1 of 2 points, 1 not graded here.")
    assert [test["output"].startswith(NOT_GRADED_HERE) for test in content["tests"]].count(True) == 1
    runner = dict.fromkeys((names[0] for names in classroom50.TEXTS.values()), "submit")
    names = [test["test-name"] for test in classroom50.result(row, COURSE, runner, datetime.now())["tests"]]
    assert [name.endswith(f"({NOT_GRADED_HERE})") for name in names].count(True) == 1
    (share,) = gradebook.regions([row], COURSE)  # neither a mistake nor a region that was not tried
    assert gradebook.mistakes([row]) == [] and (share.full, share.max_points) == (1, 1)
