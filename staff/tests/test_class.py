"""A made class is graded as it must be: full marks, none, or the very tests to fail."""

import json
import subprocess
import sys

import pytest

from common.paths import ROOT
from course.table import load_course
from staff.proofs.class_check import complaints

COURSE = load_course()
TESTS = [
    ("test_load", "1.1"),
    ("test_backward", "1.2"),
    ("test_step", "1.3"),
    ("test_gather", "2a.3"),
    ("test_p", "p.2"),
]


def report(**statuses):
    """Every test passed but those named."""
    tests = [
        {
            "id": f"tests/test_x.py::{name}",
            "region": region,
            "status": statuses.get(name, "passed"),
            "points": 2 * (name not in statuses),
        }
        for name, region in TESTS
    ]
    return {"tests": tests, "score": sum(test["points"] for test in tests)}


def made(form="zip", **expects):
    return {"kind": "", "form": form, "notes": [], "expects": expects}


@pytest.mark.parametrize(
    "row, graded",
    [
        (made(), report()),
        (made(fails=["test_backward"]), report(test_backward="wrong", test_step="skipped")),
        (made(open=["p.2"]), report(test_p="not attempted")),
        (made(files=["pipeline/pipe.py"]), report(test_p="crashed")),
        (made("an empty zip"), {"tests": [], "score": 0}),
    ],
)
def test_a_report_that_fits_the_submission_is_no_complaint(row, graded):
    assert complaints(row, graded, COURSE) == []


@pytest.mark.parametrize(
    "row, graded, complaint",
    [
        (made(), report(test_p="wrong"), "test_p: expected passed, got wrong"),
        (made(fails=["test_backward"]), report(), "test_backward: expected failed, got passed"),
        (made(fails=["test_backward"]), report(test_backward="wrong", test_p="wrong"), "test_p: expected passed"),
        (made(open=["p.2"]), report(), "expected no point for region p.2"),
        (made(files=["pipeline/pipe.py"]), report(test_gather="crashed"), "test_gather: expected passed, got crashed"),
        (made("an empty zip"), {"tests": [], "score": 3}, "expected 0 points for an empty zip, got 3"),
    ],
)
def test_a_report_that_does_not_fit_is_said(row, graded, complaint):
    assert any(complaint in said for said in complaints(row, graded, COURSE))


@pytest.mark.slow
def test_a_class_is_graded_as_it_must_be(tmp_path):
    def run(*words):
        done = subprocess.run([sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        return json.loads(done.stdout.splitlines()[-1])

    run("staff.proofs.class_of_submissions", "--size", 14, "--seed", 2, "--out", tmp_path / "class")
    hand_ins = sorted((tmp_path / "class/submissions").iterdir())
    run("staff.grade", *hand_ins, "--out", tmp_path / "graded", "--jobs", 2)

    assert run("staff.proofs.class_check", tmp_path / "class", tmp_path / "graded")["as_expected"] == 14
