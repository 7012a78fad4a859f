"""`staff.mistakes --bank FILE`: entries from elsewhere, each graded by itself and reported in one line."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from common.errors import InputError
from common.paths import ROOT
from staff import mistakes
from staff.mistakes import is_about
from staff.proofs import grading_pool, verdict
from staff.proofs.bank import Entry, load_file
from staff.proofs.grading_pool import GradingPool
from staff.proofs.grading_pool import Test as Grader
from staff.proofs.verdict import Verdict
from tests.own.started_processes import processes_with

TOP = 'task = "1"\nfile = "task1_single/run_glue.py"\n'
ENTRIES = """
["right, in other words"]
body."1.2" = '''
gradient = loss.backward
gradient()
'''

["no step"]
fails.test_every_step_moves_the_parameters_by_the_gradient_of_a_new_batch = "no such words"
body."1.3" = '''
optimizer.step
'''

["a copy in task 2b that does not work, starts a process, prints and writes"]
file = "task2b_allreduce/run_glue.py"
body."1.1" = '''
import subprocess
subprocess.Popen(["sleep", "3600"], start_new_session=True)
print("x" * 1_000_000)
open("here.txt", "w").write("left")
model = BertForSequenceClassification(bert_config)
'''

["no such region"]
body."9.9" = "pass"

["no Python"]
body."1.2" = "loss.backward("

["a patch for other lines"]
patch = "-these are nowhere\\n"
"""


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Every entry's line by its name, the last line, the exit code, and the folder that all of it could write to."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "bank.toml").write_text(TOP + ENTRIES)
    (folder / "tmp").mkdir()
    command = [sys.executable, "-m", "staff.mistakes", "--bank", folder / "bank.toml"]
    command += ["--seed", "5", "--workers", "1"]  # one that loads torch is enough
    environment = os.environ | {"TMPDIR": str(folder / "tmp")}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.stderr == ""
    *lines, figures = (json.loads(line) for line in process.stdout.splitlines())
    return {line["name"]: line for line in lines}, figures, process.returncode, folder


@pytest.mark.medium
def test_every_entry_has_a_line_with_its_points_its_warnings_or_its_error(graded):
    lines, figures, code, _ = graded
    right, wrong, copy, *errors = lines.values()

    assert right == {
        "name": "right, in other words", "task": "1", "points_lost": {}, "failed": {}, "warned": []
    }  # fmt: skip
    assert wrong["points_lost"]["1.3"] == 4
    assert all(message.startswith("wrong: ") for message in wrong["failed"].values())
    assert "seed 5" in " ".join(wrong["failed"].values())
    assert wrong["complaint"] == "caught, but the message does not say 'no such words'"
    (warning,) = copy["warned"]
    assert warning.startswith("task2b_allreduce/run_glue.py:") and copy["points_lost"] == {}  # graded in its own file
    assert [line["name"] for line in errors] == ["no such region", "no Python", "a patch for other lines"]
    assert not any("\n" in line["error"] for line in errors)
    assert figures == {"entries": 6, "lose_points": 1, "errors": 3, "complaints": 1, "seed": 5}
    assert code == 1


@pytest.mark.medium
def test_no_process_and_no_file_is_left(graded):
    _, _, _, folder = graded

    assert processes_with(folder) == []
    assert list((folder / "tmp").iterdir()) == []


def dies_of_the_second(entry, tests, seeds):
    if entry.name == "second":
        os._exit(1)
    return Verdict(entry, seed=seeds[0])


def test_an_entry_that_ends_the_process_that_grades_it_is_blamed_and_the_others_are_graded(monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(verdict, "judge", dies_of_the_second)
    monkeypatch.setattr(grading_pool, "one_process", lambda: ProcessPoolExecutor(1, fork))
    entries = [Entry("file", "bank", name, "1", "a.py", {"1.2": "x"}) for name in ("first", "second", "third")]

    with contextlib.closing(GradingPool(1)) as pool:
        verdicts = list(verdict.judge_all(pool, [(entry, {}, [1]) for entry in entries]))

    assert [(judged.entry.name, judged.error) for judged in verdicts] == [
        ("first", ""), ("second", "it ended the process that grades it"), ("third", "")
    ]  # fmt: skip


ENDLESS = """
import pathlib, time

def test_never_ends():
    while True:
        time.sleep(0.01)

def test_comes_afterwards():
    pathlib.Path("reached").touch()
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("graders", "limit", "error", "words"),
    [(ENDLESS, 2, TimeoutError, "not ended after 2 s"), ("import no_such_module", 900, RuntimeError, "no_such_module")],
)
def test_graders_that_never_end_or_cannot_be_loaded_are_no_verdict(tmp_path, monkeypatch, graders, limit, error, words):
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['grader.plugin']\n")
    (tmp_path / f"test_{error.__name__}.py").write_text(graders)  # two modules of one name would be one
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    monkeypatch.setattr(grading_pool, "ROOT", tmp_path)
    monkeypatch.setattr(grading_pool, "LIMIT", limit)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error, match=words):
        grading_pool.grade(tmp_path, [f"test_{error.__name__}.py"], 1)

    assert not (tmp_path / "reached").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("fails.test_x = 'y'", "expected a body or a patch"),
        ("body = 'y'", "body: expected a table"),
        ("body.'1.2' = 3", "expected texts in body and fails"),
        ("patch = ['y']", "patch: expected a text"),
        ("body.'1.2' = 'y'\nfails = 'y'", "fails: expected a table"),
        ("body.'1.2' = 'y'\nfails.test_x = [1]", "expected texts in body and fails"),
        ("body.'1.2' = 'y'\nbodies = 'y'", "unknown key 'bodies'"),
    ],
)
def test_a_row_that_is_no_entry_says_so_and_the_others_remain(tmp_path, row, message):
    path = tmp_path / "bank.toml"
    path.write_text(TOP + f"['bad']\n{row}\n['good']\nbody.'1.2' = 'y'\n")

    bad, good = load_file(path)

    assert message in bad.error
    assert (good.name, good.error, good.fails) == ("good", "", {})


def test_every_entry_of_an_unknown_task_says_which_tasks_there_are(tmp_path):
    path = tmp_path / "bank.toml"
    path.write_text("task = '7'\nfile = 'x.py'\n['one']\nbody.'7.1' = 'y'\n")

    (entry,) = load_file(path)

    assert "one of 1, 2a" in entry.error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("x = (", "expected a bank as TOML"),
        ("task = '1'", "no file"),
        ("task = 1\nfile = 'x'", "no task"),
        (TOP, "at least one entry"),
        (TOP + "['one']\nbody.'1.2' = 'y'", "no entry matches"),
    ],
)
def test_a_file_without_entries_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "bank.toml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(InputError, match=message):
        mistakes.main(["--bank", str(path), "--only", "another"])


@pytest.mark.parametrize("flags", [["--times", "2"], ["--cover"], ["--again"], ["--minutes", "1"]])
def test_a_file_is_graded_once_and_as_a_whole(flags):
    with pytest.raises(InputError, match="leave out"):
        mistakes.main(["--bank", "x.toml", *flags])


def test_an_entry_is_about_the_regions_that_it_changes_and_those_whose_tests_it_must_fail():
    tests = {"test_a": Grader("t.py::test_a", "a.py", "1.4")}
    entry = Entry("mistakes", "bank", "a name", "1", "a.py", {"1.2/2": "x"}, fails={"test_a": ("words",)})

    assert [region for region in ("1.2", "1.3", "1.4") if is_about(entry, region, tests)] == ["1.2", "1.4"]


def test_a_variant_that_is_a_patch_is_about_every_region_of_its_file():
    tests = {"test_a": Grader("t.py::test_a", "a.py", "1.4"), "test_b": Grader("t.py::test_b", "b.py", "1.3")}
    entry = Entry("variants", "bank", "a name", "1", "a.py", {}, patch="- x\n+ y\n")

    assert [region for region in ("1.2", "1.3", "1.4") if is_about(entry, region, tests)] == ["1.4"]
