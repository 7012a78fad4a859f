"""Our own tests of the graders' frame: points that add up, hints in turn, a report, files that do not load."""

import json

import pytest

from common.errors import InputError
from course.table import load_course
from grader import report
from grader.grading import Grade, Session
from grader.plugin import next_hint, pytest_configure
from grader.ranks.outcome import Failure, Frame, RankResult, Result
from grader.report import Entry
from grader.verdicts import STATUSES, Crashed, TimedOut
from tests.own.started_processes import run

pytestmark = pytest.mark.medium

COURSE = load_course()


def test_hints_come_one_after_the_other_and_are_counted_per_region(tmp_path):
    kept = tmp_path / "shown.json"

    said = [next_hint(COURSE, "2a.3", kept) for _ in range(4)]

    for number in range(3):
        assert COURSE.regions["2a.3"].hints[number] in said[number]
        assert f"hint {number + 1} of 3" in said[number]
    assert all(hint in said[3] for hint in COURSE.regions["2a.3"].hints)
    assert "hint 1 of 3" in next_hint(COURSE, "1.2", kept)


def test_a_hint_for_an_unknown_region_names_those_there_are(tmp_path):
    with pytest.raises(InputError, match=r"1\.1, 1\.2.*got '9\.9'"):
        next_hint(COURSE, "9.9", tmp_path / "shown.json")


def test_a_report_has_a_score_and_every_test_with_its_message(tmp_path):
    entries = [Entry("t::a", "1", "1.1", "passed", 2, 2, ""), Entry("t::b", "1", "1.2", "wrong", 0, 3, "no")]

    written = report.Report(tmp_path / "report.json")
    for entry in entries:
        written.add(entry, None)

    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["score"], content["max_score"]) == (2, 5)
    assert content["tests"][1] == {
        "id": "t::b", "task": "1", "region": "1.2", "status": "wrong", "points": 0, "max_points": 3, "message": "no",
    }  # fmt: skip
    assert any("2/5" in line for line in report.render(entries, COURSE))
    assert {entry["status"] for entry in content["tests"]} <= set(STATUSES)


def test_bonus_points_have_a_sum_of_their_own(tmp_path):
    entries = [Entry("t::a", "1", "1.1", "passed", 2, 2, ""), Entry("t::b", "b", "b.1", "passed", 4, 4, "")]

    written = report.Report(tmp_path / "report.json", COURSE.bonus_tasks)
    for entry in entries:
        written.add(entry, None)

    content = json.loads((tmp_path / "report.json").read_text())
    sums = {key: content[key] for key in ("score", "max_score", "bonus", "max_bonus")}
    assert sums == {"score": 2, "max_score": 2, "bonus": 4, "max_bonus": 4}
    *_, total, bonus = report.render(entries, COURSE)
    assert total.split() == ["total", "2/2"]
    assert bonus.split() == ["bonus", "on", "top", "of", "the", "total", "4/4"]


def test_a_grader_that_is_killed_leaves_the_points_earned_until_then(tmp_path):
    earned = Entry("t::a", "1", "1.1", "passed", 2, 2, "")
    to_come = [Entry(id, "1", "1.1", report.PENDING, 0, 2, report.NOT_REACHED) for id in ("t::a", "t::b")]

    written = report.Report(tmp_path / "report.json")
    written.expect(to_come)
    written.add(earned, None)

    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["score"], content["max_score"]) == (2, 4)
    assert [test["status"] for test in content["tests"]] == ["passed", "timed out"]


def test_a_report_keeps_what_the_ranks_of_a_failed_test_printed_and_of_no_other(tmp_path):
    ranks = [RankResult(0, "returned", stdout="x" * 9000 + "end"), RankResult(1, "raised", where="a.py:3")]
    run = Result(ranks, None, [], 1.0)

    written = report.Report(tmp_path / "report.json")
    for id, status in (("t::a", "passed"), ("t::b", "crashed")):
        written.add(Entry(id, "1", "1.1", status, 0, 2, "\udc80"), run)

    (kept,) = json.loads((tmp_path / "report.json").read_text())["output"].values()
    assert [rank["ended"] for rank in kept] == ["returned", "raised at a.py:3"]
    assert kept[0]["stdout"].endswith("xend") and len(kept[0]["stdout"]) == report.LONGEST_OUTPUT


@pytest.mark.parametrize(
    "source, verdict, words",
    [
        ("def train(:\n", Crashed, "SyntaxError"),
        ("import no_such_module\n", Crashed, "no_such_module"),
        ("import sys\nsys.exit(0)\n", Crashed, "exited with code 0"),
        ("while True: pass\n", TimedOut, "run_glue.py:1"),
    ],
)
def test_a_file_that_does_not_load_is_named_and_run_once(tmp_path, monkeypatch, source, verdict, words):
    (tmp_path / "task1_single").mkdir()
    (tmp_path / "task1_single/run_glue.py").write_text(source)
    monkeypatch.setattr("grader.grading.LOAD_DEADLINE", 2.0)
    session = Session(tmp_path, COURSE, 1)

    for number in range(2):
        grade = Grade(session, "1.2", f"test{number}")
        with pytest.raises(verdict, match=r"task1_single/run_glue.py cannot be loaded") as caught:
            grade.run("grader.inside.context:call", 1)
        assert words in str(caught.value)

    assert len(session.runs) == 1


def test_a_crash_in_the_lines_of_another_region_names_that_region(tmp_path):
    source = "\n".join(["# TODO(cos598d) 1.4: evaluate", "evaluate(0)", "# END TODO 1.4", "step()"])
    (tmp_path / "task1_single").mkdir()
    (tmp_path / "task1_single/run_glue.py").write_text(source)
    grade = Grade(Session(tmp_path, COURSE, 1), "1.2", "test")

    def crashed_at(line):
        frame = Frame("task1_single/run_glue.py", line, "train", "")
        return Result([RankResult(0, "raised", error=Failure("TypeError", "no", trace=[frame]))], None, [], 1.0)

    assert "this line belongs to region 1.4" in str(grade.verdict(crashed_at(2)))
    assert "belongs to" not in str(grade.verdict(crashed_at(4)))


def test_a_python_without_torch_is_told_what_to_activate(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(pytest.UsageError, match=r"expected a Python with torch.*source \.venv/bin/activate"):
        pytest_configure(None)


@pytest.mark.medium
def test_the_graders_of_one_region_can_be_run_alone():
    done = run("-m", "pytest", "-q", "--collect-only", "--region", "1.2", "tests/training/test_loop.py")

    names = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert names == [
        "test_backward_gives_the_gradient_of_the_batch",
        "test_every_batch_has_a_gradient_of_its_own",
    ]
    wrong = run("-m", "pytest", "--region", "9.9", "tests/task1/test_bert.py")
    assert wrong.returncode == 4 and "expected a region, one of 1.1, 1.2" in wrong.stderr
