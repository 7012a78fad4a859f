"""The autograders: results.json by the specification, late days, the zip, and a try as the platform."""

import json
import os
import re
import subprocess
import sys
import zipfile
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from course.zip_files import write_zip
from grader.report import render
from staff.grade.hidden_tests import VISIBILITIES, hidden_files
from staff.grade.submissions import write_files
from staff.gradescope import build, gradescope_run
from staff.gradescope.classroom50 import result
from staff.gradescope.classroom50 import unfinished as unfinished_of_classroom50
from staff.gradescope.results import late_days, results, too_slow, unfinished
from staff.proofs.bank import solved_files
from staff.tests.cluster.started_processes import started, wait_for
from staff.tests.rows import entry, row

pytestmark = pytest.mark.medium

COURSE = load_course()
FORMATS = {"text", "html", "simple_format", "md", "ansi"}
FIELDS: dict[str, type | tuple[type, ...]] = {  # of the specification
    "score": (int, float), "max_score": (int, float), "execution_time": (int, float), "status": str, "name": str,
    "number": str, "output": str, "output_format": str, "test_output_format": str, "test_name_format": str,
    "name_format": str, "visibility": str, "stdout_visibility": str, "tags": list, "extra_data": dict, "tests": list,
}  # fmt: skip
LONGEST = 100_000  # characters; the platform cuts there


def check_schema(content: dict) -> None:
    """results.json by the specification: known fields of the right types and values, a score that can be had."""
    for fields in (content, *content["tests"]):
        for name, value in fields.items():
            assert isinstance(value, FIELDS[name]) and not isinstance(value, bool), (name, value)
            assert not name.endswith("format") or value in FORMATS, (name, value)
            assert not name.endswith("visibility") or value in VISIBILITIES, (name, value)
            assert not isinstance(value, str) or len(value) <= LONGEST
    for test in content["tests"]:
        assert test["status"] in ("passed", "failed") and 0 <= test["score"] <= test["max_score"]
        assert all(isinstance(tag, str) for tag in test["tags"])
    assert "score" in content and len(json.dumps(content)) < 10 * LONGEST


@pytest.mark.parametrize(
    "status, seconds, stopped, words",
    [
        ("not attempted", 300.0, False, "a solution will take about"),
        ("not attempted", 20.0, False, ""),
        ("passed", 300.0, False, ""),
        ("passed", 560.0, True, "stopped by the time-out of 600 s"),
    ],
)
def test_a_container_that_is_too_slow_is_said_to_the_instructor_already_of_the_untouched_handout(
    status, seconds, stopped, words
):
    graded = row(entry("2b.1", status), stopped=stopped)

    slow = too_slow(graded, seconds, 600)

    content = results(graded, COURSE, None, seconds, slow)
    assert words in slow and bool(slow) == bool(words)
    assert ("too_slow" in content["extra_data"]) == bool(words) and "too slow" not in content["output"]


def of(region: str = "2b.1", *outcomes: tuple[str, str, str]) -> list:
    """Entries from (name, status, message)."""
    return [entry(region, status, message, name) for name, status, message in outcomes]


def printed(*ranks: int, text: str = "hello") -> list[dict[str, object]]:
    return [{"rank": rank, "ended": "raised at x.py:3", "stdout": text, "stderr": ""} for rank in ranks]


def test_results_follow_the_specification_and_bonus_points_are_added_to_the_score_and_named_apart():
    tests = [entry("2b.1", "wrong", "m" * 50_000, f"test_{n}") for n in range(100)]
    graded = row(entry("2b.1", "passed"), entry("b.1", "passed", most=4), *tests, output={
        tests[0].id: printed(*range(8), text="x" * 4000)
    })  # fmt: skip

    content = results(graded, COURSE, 2, 61.2)

    check_schema(content)
    check_schema(unfinished("what stands there until the end"))
    assert (content["score"], content["execution_time"], content["extra_data"]["late_days"]) == (6, 62, 2)
    assert content["output"].startswith("2 of 202 points and 4 of 4 bonus points.")
    assert next(test for test in content["tests"] if test["number"] == "b.1") == {
        "score": 4, "max_score": 4, "status": "passed", "name": "it works", "name_format": "text", "number": "b.1",
        "output": "", "output_format": "text", "tags": [COURSE.tasks["b"].title, "bonus"], "visibility": "visible",
    }  # fmt: skip


def test_tests_that_fail_for_one_reason_are_told_once_with_the_hint_and_what_ranks_printed_and_the_cause_comes_first():
    vague, cause = "expected 8 bytes, got 16", "did you divide?"
    tests = [
        entry("2b.1", "passed", "", "test_passes"),
        entry("2b.1", "wrong", vague, "test_bytes", seed=7),
        entry("2b.1", "wrong", "expected 3, got 1", "test_mean", cause=cause, seed=7),
        entry("2b.1", "wrong", "expected 2, got 1", "test_sizes", cause=cause, seed=7),
        entry("2b.1", "skipped", vague, "test_later", first="2a.1"),
    ]

    content = results(row(*tests, output={test.id: printed(1) for test in tests[1:4:2]}), COURSE, None, 1)

    assert [(test["name"], test["output"]) for test in content["tests"]] == [
        ("mean", f"wrong: {cause}\nexpected 3, got 1\n\nThe same: sizes\n\nHint: {COURSE.regions['2b.1'].hints[0]}"
         "\n\nrank 1 raised at x.py:3\nhello"),
        ("sizes", 'wrong, for the same reason as "mean"'),
        ("bytes", f"wrong: {vague}"),
        ("later", f"2b.1 depends on 2a.1; observed so far: {vague}"),
        ("passes", ""),
    ]  # fmt: skip
    assert content["output"].splitlines()[-1] == "inputs were drawn with seed 7; use --seed 7 to repeat them"


def test_a_visible_test_does_not_speak_of_hidden_ones_and_what_to_look_at_is_where_no_student_sees_it():
    flag = {"file": "common/schedule.py", "line": 3, "what": "calls os._exit"}
    tests = of("2b.1", ("staff/hidden/test_b.py::test_secret", "wrong", "x"), ("test_a", "wrong", "x"))

    content = results(row(*tests, flags=[flag]), COURSE, None, 1)

    first, second = content["tests"]
    assert content["score"] == 0 and content["output"].startswith("0 of 2 points; hidden tests give the rest.")
    listed = result(row(*tests), COURSE, RUNNER, datetime.now(UTC))["tests"]
    assert [test["test-name"] for test in listed] == ["2b.1 a"]
    assert (first["visibility"], second["visibility"]) == ("visible", COURSE.hidden["visibility"])
    assert "secret" not in first["output"] and "the same" not in second["output"]
    assert content["extra_data"].pop("look_at_by_hand") == [flag]
    assert "os._exit" not in json.dumps(content) and "review" not in json.dumps(content)


DUE = "2026-03-01T23:00:00.000000-08:00"


@pytest.mark.parametrize(
    "created, users, late",
    [
        ("2026-03-01T22:59:59.000000-08:00", [], 0),
        ("2026-03-02T08:00:01.000000+01:00", [], 1),
        ("2026-03-03T22:59:59.000000-08:00", [], 2),
        ("2026-03-03T23:00:01.000000-08:00", [], 3),
        ("2026-03-03T23:00:01.000000-08:00", [{"assignment": {"due_date": "2026-03-03T23:00:00.000000-08:00"}}], 1),
        ("2026-03-03T23:00:01.000000-08:00", [{"assignment": None}, {"assignment": {"due_date": None}}], 3),
    ],
)
def test_a_day_late_is_each_that_has_begun_and_an_extension_counts(tmp_path, created, users, late):
    metadata = {"created_at": created, "assignment": {"due_date": DUE, "late_due_date": None, "total_points": "100.0"}}
    (tmp_path / "m.json").write_text(json.dumps(metadata | {"users": users}))

    assert late_days(tmp_path / "m.json") == late


@pytest.mark.parametrize(
    "dates",
    [
        {"created_at": "2026-03-01T22:59:59", "assignment": {"due_date": DUE}},
        {"created_at": DUE, "assignment": {"due_date": "2026-03-01T22:59:59"}},
        {"created_at": DUE, "assignment": {"due_date": DUE}, "users": [{"assignment": {"due_date": "2026-03-01"}}]},
    ],
)
def test_a_date_without_a_time_zone_is_refused_before_anything_is_graded(tmp_path, dates):
    (tmp_path / "submission_metadata.json").write_text(json.dumps(dates))

    with pytest.raises(InputError, match="time zone"):
        gradescope_run.main([str(tmp_path)])

    content = json.loads((tmp_path / "results/results.json").read_text())
    assert content["score"] == 0 and "time zone" in content["output"]


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
    graded = row(*of("2b.1", ("test_it_works", "passed", ""), ("test_b", "wrong", "x")))
    now = datetime(2026, 3, 1, 12, 30, 5, tzinfo=timezone(timedelta(hours=1)))

    content = result(graded, COURSE, RUNNER, now)

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
    nothing_yet = {"score": 0, "max-score": COURSE.total, "tests": []}
    assert unfinished_of_classroom50(COURSE, RUNNER, now) == content | nothing_yet
    assert result(graded, COURSE, RUNNER | {"USERNAME": "bob", "REVIEW_URL": "r"}, now) == content | {"review": "r"}


@pytest.mark.parametrize("change", [{"COMMIT_URL": ""}, {"SUBMISSION_TAG": "v1"}, {"CLASSROOM": ""}])
def test_outside_of_classroom_50_it_says_what_is_missing(change):
    with pytest.raises(InputError, match=next(iter(change))):
        result(row(), COURSE, RUNNER | change, datetime.now(UTC))


def test_points_that_a_student_has_committed_are_gone_before_anything_is_graded(tmp_path):
    path = tmp_path / "result.json"
    path.write_text('{"score": 100, "tests": ["mine"]}')

    with started("-m", "staff.gradescope.classroom50", tmp_path, env=os.environ | RUNNER):
        wait_for(lambda: json.loads(path.read_text())["tests"] == [], "a result without points")


def test_the_handouts_workflow_shows_the_table_of_points_and_no_message_above_it():
    """Its sed finds the first line of the table that the graders print."""
    text = (ROOT / "staff/handout/files/grade.yml").read_text()
    (script,) = re.findall(r"sed -n '(.*?)' points.txt", text)
    table = render([entry("2b.1", "wrong", most=4)], COURSE)
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
    environment = os.environ | {"COS598D_PYTHON": sys.executable}
    subprocess.run(["bash", folder / "source/setup.sh"], env=environment, capture_output=True, check=True)
    assert (folder / "source/.python").read_text().strip() == sys.executable  # and not the one of PATH
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
    subprocess.run([folder / "source/run_autograder", folder], env=environment, capture_output=True, check=True)
    return json.loads((folder / "results/results.json").read_text())


@pytest.mark.slow
def test_a_solution_gets_full_marks_on_the_platform(autograder):
    write_files(solved_files(), autograder / "submission")
    assignment = {"due_date": "2026-03-01T23:00:00-08:00"}
    metadata = {"created_at": "2026-03-03T00:00:00-08:00", "assignment": assignment, "users": []}
    (autograder / "submission_metadata.json").write_text(json.dumps(metadata))

    content = run_autograder(autograder)

    check_schema(content)
    assert [test["name"] for test in content["tests"] if test["status"] == "failed"] == []
    assert content["score"] == sum(test["max_score"] for test in content["tests"])
    assert content["extra_data"]["late_days"] == 2


def test_what_was_earned_before_our_own_deadline_is_reported(autograder):
    content = run_autograder(autograder, timeout=45)

    check_schema(content)
    assert len(content["tests"]) > 40 and content["score"] < sum(test["max_score"] for test in content["tests"])
