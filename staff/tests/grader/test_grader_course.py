"""The graders' frame on an invented course: it knows no lesson, and makes points and messages of what tests find."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from common.paths import ROOT
from course.table import load_course
from grader.plugin import next_hint
from grader.report import Entry
from grader.weights import Weights

pytestmark = pytest.mark.medium

COURSE = load_course()
TABLE = """
tasks = ["x"]
total = 15
bonus = 4
may_change = ["lesson/*"]

[imports]
"lesson/*.py" = ["torch", "time"]

[task.x]
title = "Invented"
folder = "lesson"
submitted_as = "lesson"
readme = "README.md"
tests = ["tests/test_scale.py", "tests/test_points.py"]
marker = "invented"

[task.y]
title = "More"
folder = "lesson"
submitted_as = "lesson"
readme = "README.md"
tests = ["tests/test_points.py"]
marker = "more"
bonus = true
""" + "".join(
    f'[regions."{id}"]\ntitle = "{id}"\nfile = "{file}"\npoints = {points}\nneeds = {needs}\n'
    'hints = ["one", "two", "three"]\n'
    for id, points, needs, file in (
        ("x.1", 2, [], "lesson/tensors.py"), ("x.2", 3, [], "lesson/tensors.py"), ("x.3", 3, [], "lesson/tensors.py"),
        ("x.4", 1, ["x.2"], "lesson/tensors.py"), ("x.5", 2, [], "lesson/tensors.py"),
        ("x.6", 2, [], "lesson/tensors.py"), ("x.7", 1, [], "lesson/broken.py"), ("x.8", 1, [], "lesson/tensors.py"),
        ("y.1", 4, [], "lesson/tensors.py"),
    )
)  # fmt: skip
SETTINGS = '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--import-mode=importlib"\n'
LESSON = """import time

def scale(tensor, world_size):
    # TODO(cos598d) x.1: multiply
    print("scaled by", world_size)
    return tensor / world_size
    # END TODO x.1

def help(tensor):
    # TODO(cos598d) x.2: help
    return tensor.no_such_name
    # END TODO x.2

def begin():
    # TODO(cos598d) x.5: begin
    raise NotImplementedError("TODO x.5: begin")
    # END TODO x.5

def sleep():
    # TODO(cos598d) x.6: sleep
    time.sleep(100)
    # END TODO x.6

def solved():
    # TODO(cos598d) x.8: solve
    model = 1
    raise NotImplementedError("TODO x.8: solve")
    # END TODO x.8

def help_more():
    # TODO(cos598d) x.2: the second part, which nobody has written: the region is attempted all the same
    raise NotImplementedError("TODO x.2: help")
    # END TODO x.2
"""
TESTS = """
import pytest
from grader.in_rank import in_rank, run

graded = pytest.mark.graded

@in_rank(join=False)
def call(context, lesson, inputs):
    getattr(lesson, context.arguments["name"])(*inputs)

@graded("x.2", absence=True)
def test_nothing_is_imported(grade): pass

@graded("x.2", weight=2)
def test_it_helps(grade): grade.fail("expected help")

@graded("x.3", absence=True)
def test_nothing_is_sent(grade): assert 1 == 2

@graded("x.3", weight=2)
def test_it_works(grade): pass

@graded("x.4")
def test_it_builds_on_the_second(grade): run(grade, call, [[1]], name="help")

@graded("x.5")
def test_it_begins(grade): pass

@graded("x.6")
def test_it_wakes_up(grade): run(grade, call, [[]], name="sleep", deadline=3.0)

@graded("x.6")
def test_it_wakes_up_again(grade): run(grade, call, [[]], name="sleep", deadline=3.0, again=1)

@graded("x.7")
def test_it_loads(grade): run(grade, call, [[]], name="go")

@graded("x.8")
def test_it_is_solved(grade): run(grade, call, [[]], name="solved")

@graded("y.1")
def test_more(grade): pass
"""
RESULTS = {  # test -> status, points, the beginning of its message; in the order in which they run
    "test_each_rank_scales_its_own_tensor":
        ("wrong", 0, "result is divided: multiply by world_size\nrank 0 of 3: result (2, 3) at"),
    "test_it_helps": ("wrong", 0, "expected help (inputs drawn with seed 7; use --seed 7 to repeat them)"),
    "test_nothing_is_imported": (
        "skipped", 0, "not counted yet: this test counts only when the other tests of region x.2 pass; test_it_helps"),
    "test_it_works": ("passed", 2, ""),
    "test_nothing_is_sent": ("crashed", 0, "internal grader error (please report it): AssertionError"),
    "test_it_builds_on_the_second":
        ("skipped", 0, "depends on region x.2, which does not pass yet. Observed: rank 0 raised AttributeError"),
    "test_it_begins": ("not attempted", 0, "region x.5 is not written yet"),
    "test_it_wakes_up": ("timed out", 0, "the deadline of 3 s has passed: rank 0 was still running (lesson/tensors.py"),
    "test_it_wakes_up_again": ("timed out", 0, "the deadline of 2 s has passed"),  # a region that has timed out
    "test_it_loads": ("crashed", 0, "rank 0 raised SyntaxError: invalid syntax (broken.py, line 1) while loading"),
    "test_it_is_solved": ("crashed", 0, "your lines for region x.8 are in lesson/tensors.py, but its line `raise Not"),
    "test_more": ("passed", 4, ""),
}  # fmt: skip


def make_course(folder, lesson=LESSON):
    """A folder with the graders, an invented course, and the test file of grader/README.md beside others."""
    for name in ("grader", "course"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    example = re.search(r"```python\n(.*?)```", (ROOT / "grader/README.md").read_text(), re.DOTALL)
    assert example
    libraries = ("common/__init__.py", "common/errors.py", "common/paths.py", "tests/conftest.py")
    files = {name: (ROOT / name).read_text() for name in libraries} | {"course.toml": TABLE, "pyproject.toml": SETTINGS}
    files |= {"tests/test_scale.py": example[1], "tests/test_points.py": TESTS, "lesson/tensors.py": lesson}
    files["lesson/broken.py"] = "def train(:\n"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def pytest_in(folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--report", "report.json", *words]
    environment["COS598D_CACHE"] = str(folder / "cache")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The report of all tests, and what was printed."""
    folder = make_course(tmp_path_factory.mktemp("course"))
    done = pytest_in(folder, "--seed", "7", "tests")
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout


def name_of(test):
    return test["id"].rpartition("::")[2]


@pytest.mark.parametrize("name", RESULTS)
def test_each_test_has_its_status_its_points_and_its_message(graded, name):
    (test,) = (test for test in graded[0]["tests"] if name_of(test) == name)

    status, points, message = RESULTS[name]
    assert (test["status"], test["points"]) == (status, points), test["message"]
    assert test["message"].startswith(message)


def test_points_add_up_to_those_of_the_table_and_a_test_of_absence_runs_last(graded):
    report, _ = graded

    assert [report[key] for key in ("score", "max_score", "bonus", "max_bonus")] == [2, 15, 4, 4]
    assert [name_of(test) for test in report["tests"]] == [*RESULTS]


def test_a_student_reads_each_cause_once_what_ranks_printed_and_what_is_next(graded):
    lines = graded[1].splitlines()

    begin = lines.index("x.1 x.1: 0/2 points (lesson/tensors.py)")
    assert lines[begin + 1] == "  wrong: result is divided: multiply by world_size"
    assert lines[begin + 3 : begin + 6] == [
        "  rank 0 printed:", "    scaled by 3", "  other ranks also printed; use --prints all to see it"
    ]  # fmt: skip
    assert any(line.startswith("    this line belongs to region x.2") for line in lines)
    assert "inputs were drawn with seed 7; use --seed 7 to repeat them" in lines
    assert [line for line in lines if "not counted yet" in line] == []  # such a test is left to the table
    assert ["total", "2/15"] in [line.split() for line in lines]
    assert ["bonus", "on", "top", "of", "the", "total", "4/4"] in [line.split() for line in lines]
    assert lines[-2].startswith("next: x.1;")


def test_a_grader_that_is_killed_leaves_the_points_earned_until_then(tmp_path):
    make_course(tmp_path, LESSON.replace("tensor / world_size", "tensor * world_size"))
    tests = tmp_path / "tests/test_points.py"
    tests.write_text(
        TESTS.replace('grade.fail("expected help")', "__import__('os').kill(__import__('os').getpid(), 9)")
    )

    assert pytest_in(tmp_path, "tests").returncode == -9

    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["score"], report["max_score"]) == (2, 15)
    assert {test["status"] for test in report["tests"][1:]} == {"timed out"}


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--region", "x.9"], 4, "expected a region, one of x.1, x.2"),
    (["--hint", "x.9"], 2, "expected a region, one of x.1, x.2"),
    (["--hint", "x.3"], 0, "hint 1 of 3: one"),
])  # fmt: skip
def test_a_region_is_asked_for_by_its_name(tmp_path, words, code, said):
    done = pytest_in(make_course(tmp_path), *words)

    assert done.returncode == code and said in done.stdout + done.stderr


def test_hints_come_one_after_the_other_and_then_all(tmp_path):
    shown = [next_hint(COURSE, "2a.3", tmp_path / "shown.json") for _ in range(4)]

    hints = COURSE.regions["2a.3"].hints
    assert [[hint in text for hint in hints] for text in shown] == [
        [True, False, False], [False, True, False], [False, False, True], [True, True, True]
    ]  # fmt: skip


# --- points are those of course.toml, whatever the weights of the tests ----------------------------------------------


@pytest.mark.parametrize("points", [1, 2, 3, 5, 7, 11])
def test_a_region_gives_its_share_rounded_down_and_all_points_for_all_tests_only(points):
    weights = Weights(ROOT, COURSE)
    tests = {id: test.weight for id, test in weights.tests.items() if test.region == "p.2"}
    table = replace(COURSE, regions=COURSE.regions | {"p.2": replace(COURSE.regions["p.2"], points=points)})

    for passed in itertools.product([False, True], repeat=len(tests)):
        entries = [
            Entry(id, "p", "p.2", "passed" if ok else "wrong", 0, 0, "") for id, ok in zip(tests, passed, strict=True)
        ]
        weights.set_points(table, entries)
        weight = sum(weight for weight, ok in zip(tests.values(), passed, strict=True) if ok)
        assert sum(entry.max_points for entry in entries) == points
        assert sum(entry.points for entry in entries) == points * weight // sum(tests.values())
        assert all(ok or entry.points == 0 for entry, ok in zip(entries, passed, strict=True))


def test_every_region_has_tests_in_files_that_the_table_names_and_comes_after_those_it_builds_on():
    weights, order = Weights(ROOT, COURSE), COURSE.in_order_of_needs()

    files = {id: {test.partition("::")[0] for test, mark in weights.tests.items() if mark.region == id} for id in order}
    assert sorted(order) == sorted(COURSE.regions)
    for region, row in COURSE.regions.items():
        assert files[region] and files[region] <= {*row.tests, *COURSE.tasks[row.task].whole}
        assert all(order.index(need) < order.index(region) for need in row.needs)
