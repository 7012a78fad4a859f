"""Tests of the autograder: results.json by the specification, late days, the zip, and a try as the platform."""

import json
import os
import re
import subprocess
import sys
import zipfile
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from course.zip_files import write_zip
from grader.report import Entry, render
from staff.grade.gradebook import Row
from staff.grade.hand_ins import hidden_files
from staff.grade.submissions import write_files
from staff.gradescope import build
from staff.gradescope.classroom50 import result
from staff.gradescope.results import VISIBILITIES, late_days, results, unfinished
from staff.tests.rows import a_row, a_test

pytestmark = pytest.mark.medium

COURSE = load_course()
FORMATS = {"text", "html", "simple_format", "md", "ansi"}
TOP: dict[str, Any] = {
    "score": (int, float), "execution_time": (int, float), "output": str, "output_format": str, "visibility": str,
    "test_output_format": str, "test_name_format": str, "stdout_visibility": str, "extra_data": dict, "tests": list,
    "leaderboard": list,
}  # fmt: skip
TEST: dict[str, Any] = {
    "score": (int, float), "max_score": (int, float), "status": str, "name": str, "name_format": str, "number": str,
    "output": str, "output_format": str, "tags": list, "visibility": str, "extra_data": dict,
}  # fmt: skip
LONGEST = 100_000  # characters; the platform cuts there


def check_schema(content: dict) -> None:
    """results.json by the specification: known fields of the right types and values, a score that can be had."""
    for fields, known_fields in [(content, TOP), *((test, TEST) for test in content["tests"])]:
        for name, value in fields.items():
            assert name in known_fields, name
            assert isinstance(value, known_fields[name]) and not isinstance(value, bool), (name, value)
            assert not name.endswith("format") or value in FORMATS, (name, value)
            assert not name.endswith("visibility") or value in VISIBILITIES, (name, value)
            assert not isinstance(value, str) or len(value) <= LONGEST
    assert "score" in content or content["tests"]
    for test in content["tests"]:
        assert test["status"] in ("passed", "failed") and 0 <= test["score"] <= test["max_score"]
        assert all(isinstance(tag, str) for tag in test["tags"])
    assert len(json.dumps(content)) < 10 * LONGEST


def graded(*outcomes: tuple[str, str, str], **run) -> Row:
    """A row from (id, status, message), each of 2 points and of region 2b.1."""
    return a_row(*(a_test("2b.1", status, message) | {"id": id} for id, status, message in outcomes), **run)


def test_bonus_points_are_added_to_gradescope_s_score_and_named_apart():
    row = graded(("tests/t.py::test_a", "passed", ""))
    row.report.update({"bonus": 4, "max_bonus": 15})
    row.report["tests"].append(row.report["tests"][0] | {"task": "b", "region": "b.1", "points": 4, "max_points": 4})

    content = results(row, COURSE, None, 1.0)

    assert content["score"] == 6
    assert content["output"] == "2 of 2 points and 4 of 15 bonus points."
    assert [test["tags"][1:] for test in content["tests"]] == [[], ["bonus"]]


def test_results_follow_the_specification():
    long = [{"rank": rank, "ended": "raised", "stdout": str(rank) * 4000, "stderr": ""} for rank in range(8)]
    tests = [(f"tests/t.py::test_{n}", "wrong", "m" * 50_000) for n in range(100)]
    row = graded(("tests/t.py::test_a", "passed", ""), *tests, output={tests[0][0]: long})

    content = results(row, COURSE, 2, 61.2)

    check_schema(content)
    check_schema(unfinished("what stands there until the end"))
    assert (content["score"], content["execution_time"], content["extra_data"]["late_days"]) == (2, 62, 2)
    assert content["tests"][-1] | {"tags": []} == {
        "score": 2, "max_score": 2, "status": "passed", "name": "a", "name_format": "text", "number": "2b.1",
        "output": "", "output_format": "text", "tags": [], "visibility": "visible",
    }  # fmt: skip


def test_a_failure_says_its_status_the_hint_and_what_ranks_printed():
    ranks = [{"rank": 1, "ended": "raised at x.py:3", "stdout": "hello", "stderr": ""}]
    row = graded(("tests/t.py::test_it", "crashed", "rank 1 raised"), output={"tests/t.py::test_it": ranks})

    (test,) = results(row, COURSE, None, 1)["tests"]

    assert test["output"].startswith("crashed: rank 1 raised")
    assert COURSE.regions["2b.1"].hints[0] in test["output"] and "hello" in test["output"]


def test_tests_that_fail_for_one_reason_are_told_once_and_the_cause_comes_first():
    ranks = [{"rank": 0, "ended": "returned", "stdout": "hello", "stderr": ""}]
    vague, cause = "expected 8 bytes, got 16", "every gradient is {0} times the mean on {0} workers: did you divide?"
    seed = " (inputs drawn with seed 7; use --seed 7 to repeat them)"
    row = graded(
        ("tests/t.py::test_passes", "passed", ""),
        ("tests/t.py::test_bytes", "wrong", vague + seed),
        ("tests/t.py::test_mean", "wrong", cause.format(3) + seed),
        ("tests/t.py::test_sizes", "wrong", cause.format(2) + seed),
        (
            "tests/t.py::test_later",
            "skipped",
            f"depends on region 2a.1, which does not pass yet. Observed: {vague}",
        ),
        output={"tests/t.py::test_bytes": ranks, "tests/t.py::test_sizes": ranks},
    )

    content = results(row, COURSE, None, 1)

    assert [(test["name"], test["output"]) for test in content["tests"]] == [
        ("mean", f"wrong: {cause.format(3)}\n\nThe same: sizes\n\nHint: {COURSE.regions['2b.1'].hints[0]}"
         "\n\nrank 0 returned\nhello"),
        ("sizes", 'wrong, for the same reason as "mean"'),
        ("bytes", f"wrong: {vague}"),
        ("later", f"2b.1 depends on 2a.1; observed so far: {vague}"),
        ("passes", ""),
    ]  # fmt: skip
    assert content["output"].splitlines()[-1] == "inputs were drawn with seed 7; use --seed 7 to repeat them"


def test_a_visible_test_does_not_speak_of_hidden_ones():
    row = graded(("staff/hidden/test_b.py::test_secret", "wrong", "x"), ("tests/t.py::test_a", "wrong", "x"))

    first, second = results(row, COURSE, None, 1)["tests"]

    assert (first["visibility"], second["visibility"]) == ("visible", COURSE.hidden["visibility"])
    assert "secret" not in first["output"] and "the same" not in second["output"]


DUE = "2026-03-01T23:00:00.000000-08:00"


@pytest.mark.parametrize(
    "created, users, late",
    [
        ("2026-03-01T22:59:59.000000-08:00", [], 0),
        ("2026-03-02T08:00:01.000000+01:00", [], 1),
        ("2026-03-03T23:00:00.000000-08:00", [], 2),
        ("2026-03-04T01:00:00.000000-08:00", [{"id": 1}, {"id": 2, "assignment": {"due_date": DUE}}], 3),
        ("2026-03-04T01:00:00.000000-08:00", [{"assignment": {"due_date": "2026-03-03T23:00:00-08:00"}}], 1),
    ],
)
def test_a_day_late_is_each_that_has_begun_and_an_extension_counts(tmp_path, created, users, late):
    metadata = {"created_at": created, "assignment": {"due_date": DUE, "late_due_date": None, "total_points": "100.0"}}
    (tmp_path / "m.json").write_text(json.dumps(metadata | {"users": users}))

    assert late_days(tmp_path / "m.json") == late


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"created_at": "x", "assignment": {"due_date": null}}'])
def test_without_a_due_date_nobody_is_late(tmp_path, text):
    if text is not None:
        (tmp_path / "m.json").write_text(text)

    assert late_days(tmp_path / "m.json") is None


RUNNER = {
    "CLASSROOM": "cos598d", "ASSIGNMENT": "training", "OWNER": "alice", "SUBMISSION_TAG": "submit/2026-03-01-abc",
    "COMMIT_URL": "https://x/commit/abc", "RELEASE_URL": "https://x/releases/tag/t",
}  # fmt: skip


def test_classroom_50_gets_what_its_schema_requires():
    row = graded(("tests/t.py::test_it_works", "passed", ""), ("tests/t.py::test_b", "wrong", "x"))
    now = datetime(2026, 3, 1, 12, 30, 5, tzinfo=timezone(timedelta(hours=1)))

    content = result(row, RUNNER, now)

    assert content == {
        "schema": "classroom50/result/v1", "classroom": "cos598d", "assignment": "training", "owner": "alice",
        "assignment_type": "individual", "submission": "submit/2026-03-01-abc", "commit": "https://x/commit/abc",
        "release": "https://x/releases/tag/t", "review": "https://x/commit/abc",
        "datetime": "2026-03-01T11:30:05Z", "score": 2, "max-score": 4,
        "tests": [
            {"test-name": "2b.1 it works", "passed": True, "score": 2, "max-score": 2},
            {"test-name": "2b.1 b", "passed": False, "score": 0, "max-score": 2},
        ],
    }  # fmt: skip


@pytest.mark.parametrize("change", [{"COMMIT_URL": ""}, {"SUBMISSION_TAG": "v1"}, {"CLASSROOM": ""}])
def test_outside_of_classroom_50_it_says_what_is_missing(change):
    with pytest.raises(InputError, match=next(iter(change))):
        result(graded(), RUNNER | change, datetime.now(UTC))


def test_the_handouts_workflow_shows_the_table_of_points_and_no_message_above_it():
    """Its sed finds the first line of the table that the graders print."""
    text = (ROOT / "staff/handout/files/grade.yml").read_text()
    (script,) = re.findall(r"sed -n '(.*?)' points.txt", text)
    entry = Entry("test_a", "2b", "2b.1", "wrong", 0, 4, "")
    table = render([entry], COURSE)
    printed = ["..F", "task 2b takes 3/4 of the points, it says", "  2b.1: wrong", "", *table, "next: 2b.1"]

    sed = subprocess.run(["sed", "-n", script], input="\n".join(printed), capture_output=True, text=True, check=True)

    assert table[0].startswith("task 2b ") and table[0].endswith("0/4")
    assert sed.stdout.splitlines() == [*table, "next: 2b.1"]


@pytest.fixture(scope="module")
def autograder(tmp_path_factory) -> Path:
    """A folder as the platform makes it, set up; a Python that has everything is there already."""
    folder = tmp_path_factory.mktemp("autograder")
    write_zip(build.contents(), folder / "a.zip")
    with zipfile.ZipFile(folder / "a.zip") as opened:
        for info in opened.infolist():
            Path(opened.extract(info, folder / "source")).chmod(info.external_attr >> 16 & 0o777)
    for name in ("submission", "results"):
        (folder / name).mkdir()
    process = subprocess.run(
        ["bash", folder / "source/setup.sh"], env=os.environ | {"COS598D_PYTHON": sys.executable}, capture_output=True
    )
    assert process.returncode == 0, process.stderr.decode()[-1000:]
    return folder


def test_the_zip_has_what_the_platform_runs_and_no_solution(autograder):
    source = autograder / "source"
    names = {path.relative_to(source).as_posix() for path in source.rglob("*")}

    assert all(os.access(source / name, os.X_OK) for name in ("setup.sh", "run_autograder"))
    assert not [name for name in names if "banks" in name or "attacks" in name or "staff/tests" in name]
    for region in COURSE.regions.values():
        text = (source / region.file).read_text(encoding="utf-8")
        assert "BEGIN SOLUTION" not in text and f'NotImplementedError("TODO {region.id}' in text, region.file
    assert set(hidden_files()) <= names


def run_autograder(folder: Path, timeout: int = 600) -> dict:
    environment = os.environ | {"TIMEOUT": str(timeout), "COS598D_SLOWNESS": "3"}
    script = folder / "source/run_autograder"
    process = subprocess.run([script, folder], env=environment, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-1000:]
    return json.loads((folder / "results/results.json").read_text())


def test_what_to_look_at_by_hand_is_where_no_student_sees_it():
    flag = {"file": "common/schedule.py", "line": 3, "what": "calls os._exit"}

    content = results(graded(("tests/t.py::test_a", "passed", ""), flags=[flag]), COURSE, None, 1.0)

    assert content["extra_data"].pop("look_at_by_hand") == [flag]
    assert "os._exit" not in json.dumps(content) and "review" not in json.dumps(content)


@pytest.mark.slow
def test_a_solution_gets_full_marks_on_the_platform(autograder):
    solved = {region.file: (ROOT / region.file).read_bytes() for region in COURSE.regions.values()}
    write_files(solved, autograder / "submission")
    assignment = {"due_date": "2026-03-01T23:00:00-08:00"}
    metadata = {"created_at": "2026-03-03T00:00:00-08:00", "assignment": assignment, "users": []}
    (autograder / "submission_metadata.json").write_text(json.dumps(metadata))

    content = run_autograder(autograder)

    check_schema(content)
    assert [test["name"] for test in content["tests"] if test["status"] == "failed"] == []
    assert content["score"] == sum(test["max_score"] for test in content["tests"])
    assert content["extra_data"]["late_days"] == 2


def test_what_was_earned_before_our_own_deadline_is_reported(autograder, tmp_path):
    content = run_autograder(autograder, timeout=45)

    check_schema(content)
    assert len(content["tests"]) > 40 and content["score"] < sum(test["max_score"] for test in content["tests"])
