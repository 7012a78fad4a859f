"""Our own tests of the graders' frame: points that add up, hints in turn, a report, files that do not load."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from grader import report
from grader.grading import Grade, Session
from grader.plugin import SESSION, next_hint, pytest_configure, pytest_sessionstart
from grader.ranks.outcome import Failure, Frame, RankResult, Result
from grader.report import Entry
from grader.verdicts import Crashed, TimedOut
from grader.weights import Weights
from staff.proofs import grading_pool
from tests.pipeline import test_schedule

pytestmark = pytest.mark.medium

COURSE = load_course()


def test_hints_come_one_after_the_other_and_are_counted_per_region(tmp_path):
    counts_file = tmp_path / "shown.json"

    messages = [next_hint(COURSE, "2a.3", counts_file) for _ in range(4)]

    for number in range(3):
        assert COURSE.regions["2a.3"].hints[number] in messages[number]
        assert f"hint {number + 1} of 3" in messages[number]
    assert all(hint in messages[3] for hint in COURSE.regions["2a.3"].hints)
    assert "hint 1 of 3" in next_hint(COURSE, "1.2", counts_file)


def test_a_hint_for_an_unknown_region_names_those_there_are(tmp_path):
    with pytest.raises(InputError, match=r"1\.1, 1\.2.*got '9\.9'"):
        next_hint(COURSE, "9.9", tmp_path / "shown.json")


def written(folder, *entries, run=None, expected=(), bonus=()):
    """The report's content after a grading with these entries."""
    made = report.Report(folder / "report.json", bonus)
    made.expect(expected)
    for entry in entries:
        made.add(entry, run)
    return json.loads((folder / "report.json").read_text())


def test_a_report_has_every_test_with_its_message_and_a_sum_of_its_own_for_bonus_points(tmp_path):
    entries = [
        Entry("t::a", "1", "1.1", "passed", 2, 2, ""), Entry("t::b", "1", "1.2", "wrong", 0, 3, "no"),
        Entry("t::c", "b", "b.1", "passed", 4, 4, ""),
    ]  # fmt: skip

    content = written(tmp_path, *entries, bonus=COURSE.bonus_tasks)

    assert [content[key] for key in ("score", "max_score", "bonus", "max_bonus")] == [2, 5, 4, 4]
    assert content["tests"][1] == {
        "id": "t::b", "task": "1", "region": "1.2", "status": "wrong", "points": 0, "max_points": 3, "message": "no",
    }  # fmt: skip
    *_, total, bonus = report.render(entries, COURSE)
    assert total.split() == ["total", "2/5"]
    assert bonus.split() == ["bonus", "on", "top", "of", "the", "total", "4/4"]


def test_a_grader_that_is_killed_leaves_the_points_earned_until_then(tmp_path):
    to_come = [Entry(id, "1", "1.1", report.PENDING, 0, 2, report.NOT_REACHED) for id in ("t::a", "t::b")]

    content = written(tmp_path, Entry("t::a", "1", "1.1", "passed", 2, 2, ""), expected=to_come)

    assert (content["score"], content["max_score"]) == (2, 4)
    assert [test["status"] for test in content["tests"]] == ["passed", "timed out"]


def test_a_report_keeps_what_the_ranks_of_a_failed_test_printed_and_of_no_other(tmp_path):
    ranks = [RankResult(0, "returned", stdout="x" * 9000 + "end"), RankResult(1, "raised", where="a.py:3")]
    run = Result(ranks, None, [], 1.0)
    entries = [Entry(f"t::{status}", "1", "1.1", status, 0, 2, "\udc80") for status in ("passed", "crashed")]

    (kept,) = written(tmp_path, *entries, run=run)["output"].values()

    assert [rank["ended"] for rank in kept] == ["returned", "raised at a.py:3"]
    assert kept[0]["stdout"].endswith("xend") and len(kept[0]["stdout"]) == report.LONGEST_OUTPUT


@pytest.mark.parametrize(
    "source, verdict, words",
    [("def train(:\n", Crashed, "SyntaxError"), ("while True: pass\n", TimedOut, "run_glue.py:1")],
)
def test_a_file_that_does_not_load_is_named_and_run_once(tmp_path, monkeypatch, source, verdict, words):
    (tmp_path / "task1_single").mkdir()
    (tmp_path / "task1_single/run_glue.py").write_text(source)
    monkeypatch.setattr("grader.grading.LOAD_DEADLINE", 1.0)
    session = Session(tmp_path, COURSE, 1)

    for number in range(2):
        grade = Grade(session, "1.2", f"test{number}")
        with pytest.raises(verdict, match=r"task1_single/run_glue.py cannot be loaded") as caught:
            grade.run(1)
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


def test_a_region_that_there_is_not_is_a_usage_error_that_names_those_there_are():
    config = SimpleNamespace(getoption=lambda name: "9.9", stash={SESSION: SimpleNamespace(course=COURSE)})

    with pytest.raises(pytest.UsageError, match=r"expected a region, one of 1\.1, 1\.2"):
        pytest_sessionstart(SimpleNamespace(config=config))


def test_regions_are_graded_after_those_they_build_on():
    order = COURSE.in_order_of_needs()

    assert sorted(order) == sorted(COURSE.regions)
    for region, row in COURSE.regions.items():
        assert all(order.index(need) < order.index(region) for need in row.needs)


# --- points are those of course.toml, whatever the weights of the tests ----------------------------------------------

FILE = """
import pytest
graded = pytest.mark.graded

@graded("1.2", weight=2)
def test_a(grade): ...

@pytest.mark.graded("1.2", absence=True)
def test_b(grade): ...

@graded("1.2")
def test_c(grade): ...

def test_of_nothing(): ...
"""


@pytest.fixture
def weights(tmp_path):
    """Three tests of 1.2, of the weights 2, 1 and 1."""
    file = COURSE.tasks["1"].tests[0]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(FILE)
    return Weights(tmp_path, COURSE)


def share(weights, points, passed):
    """Points and most points of the tests that have run, where the region has so many points."""
    entries = [
        Entry(id, "1", "1.2", "passed" if ok else "wrong", 0, 0, "")
        for id, ok in zip(weights.tests, passed, strict=False)
    ]
    row = replace(COURSE.regions["1.2"], points=points)
    weights.share_out(replace(COURSE, regions=COURSE.regions | {"1.2": row}), entries)
    return [entry.points for entry in entries], [entry.max_points for entry in entries]


def test_marks_are_read_from_files_that_are_not_run(weights):
    assert [id.rpartition("::")[2] for id in weights.tests] == ["test_a", "test_b", "test_c"]
    assert weights.of_region("1.2") == 4


@pytest.mark.parametrize("points", [1, 2, 3, 4, 5, 7, 11])
def test_a_region_gives_its_share_rounded_down_and_all_points_for_all_tests_only(weights, points):
    for passed in itertools.product([False, True], repeat=3):
        got, most = share(weights, points, passed)
        weight = sum(w for w, ok in zip((2, 1, 1), passed, strict=True) if ok)
        assert sum(most) == points
        assert sum(got) == points * weight // 4
        assert all(got[k] == 0 for k in range(3) if not passed[k])


def test_a_part_of_the_tests_can_only_give_its_part(weights):
    assert share(weights, 3, [True]) == ([1], [1])


def test_every_region_of_the_course_has_tests():
    weights = Weights(ROOT, COURSE)

    assert [id for id in COURSE.regions if not weights.of_region(id)] == []


# --- tests that only show that something is not there: they run last in their region, and count beside passed ones ----

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
    assert graded.results["test_nothing_is_imported"].message.startswith(
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
