"""Tests of the grading of a class: what is taken of a hand-in, what is kept, and that nothing is lost or done twice."""

import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from staff.grade import gradebook, hand_ins, result_store, texts, whole_class
from staff.grade.class_files import write_class
from staff.grade.gradebook import Row
from staff.grade.hand_ins import Grading
from staff.grade.own_process import run_apart
from staff.grade.result_store import at_work
from staff.grade.submissions import Submission, choose, clean_files, name_all, write_tree
from staff.sandbox.graded_run import Outcome
from staff.tests.rows import a_row, a_test

COURSE = load_course()
QUICK = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
HOME = "common/data_partition.py"
BROKEN = "\u6f22\u5b57"


def hand_in(folder: Path, *files: str, text: str = "pass\n") -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize(
    "handed_in, taken",
    [
        (["task2a/run_glue.py"], {"task2a_gather_scatter/run_glue.py"}),  # the course's name of the folder
        (["Task3/run_glue.py", "pipeline/pipe.py"], {"task3_ddp/run_glue.py", "pipeline/pipe.py"}),
        (["task2b/mine/helper.py"], {"task2b_allreduce/mine/helper.py"}),
        (["notes.txt", "group 3/final/task1/a.py", f"group 3/final/{HOME}"], {"task1_single/a.py", HOME}),
        (["task1/a.py", "common/data/glue.py", "grader/ranks/one_run.py", "tests/conftest.py"], {"task1_single/a.py"}),
        ([HOME, "conftest.py", "pytest.ini", "torch.py", "course.toml"], {HOME}),
    ],
)
def test_what_a_student_may_change_is_taken_from_wherever_it_lies(tmp_path, handed_in, taken):
    assert set(choose(hand_in(tmp_path, *handed_in), COURSE)[0]) == taken


def test_a_task_handed_in_twice_is_said(tmp_path):
    hand_in(tmp_path, "task1/run_glue.py", "task1_single/run_glue.py")

    files, notes = choose(tmp_path, COURSE)

    assert list(files) == ["task1_single/run_glue.py"]
    assert "task1_single/run_glue.py was also submitted" in notes[0]


def test_what_is_not_handed_in_is_the_handouts_and_not_the_solution(tmp_path):
    hand_in(tmp_path / "in", "task1/run_glue.py", text="mine = 1\n")
    clean = clean_files()

    write_tree(clean, choose(tmp_path / "in", COURSE)[0], tmp_path / "tree")

    assert (tmp_path / "tree/task1_single/run_glue.py").read_text() == "mine = 1\n"
    assert "raise NotImplementedError" in (tmp_path / "tree/task2a_gather_scatter/run_glue.py").read_text()
    assert not any("SOLUTION" in path.read_text() for path in (tmp_path / "tree").rglob("*.py"))
    assert not (tmp_path / "tree/course.toml").exists()  # hints


def test_the_clean_tree_of_a_handout_is_the_handout_and_no_submission_can_write_into_the_next_ones_tree(tmp_path):
    clean = clean_files()
    write_tree(clean, {}, tmp_path / "first")
    assert clean_files(tmp_path / "first") == clean
    (tmp_path / "first" / HOME).write_text("poisoned\n")

    write_tree(clean, {}, tmp_path / "second")

    assert (tmp_path / "second" / HOME).read_bytes() == clean[HOME]


def test_a_folder_in_place_of_a_file_is_said(tmp_path):
    hand_in(tmp_path / "in", "pipeline/pipe.py/inside.py")

    with pytest.raises(InputError, match=r"^pipeline/pipe\.py: expected a file of the course"):
        write_tree(clean_files(), choose(tmp_path / "in", COURSE)[0], tmp_path / "tree")


def test_a_hand_in_without_the_courses_folders_is_said(tmp_path):
    hand_in(tmp_path / "in", "report.txt")

    with pytest.raises(InputError, match="expected the folders of the course"):
        choose(tmp_path / "in", COURSE)


def test_submissions_are_named_after_folders_and_zips():
    submissions = name_all(
        [Path("/x/alice.zip"), Path("/x/bob"), Path("/y/hand in.ZIP"), Path("/y/carol/hw.zip"), Path("/y/dan/hw.zip")]
    )

    assert [submission.name for submission in submissions] == ["alice", "bob", "hand_in", "carol-hw", "dan-hw"]


@pytest.mark.parametrize("name", ["..", "a\nb", "\udcff", "x" * 300, "\U00020000" * 100, "<b>", "."])
def test_every_name_can_be_a_folder_and_a_cell(tmp_path, name):
    (submission,) = name_all([Path("/x") / f"{name}.zip"])

    (tmp_path / submission.name).mkdir()
    assert submission.name not in ("", ".", "..") and len(submission.name) <= 80
    assert submission.name.encode() and not set(submission.name) & set("/\n<>")


@pytest.mark.parametrize(
    "paths",
    [
        ["/a/x/hw.zip", "/b/x/hw.zip"],
        ["/a/alice smith.zip", "/a/alice_smith.zip"],
        ["/a/alice", "/a/alice.zip"],
        ["/a/Alice.zip", "/a/alice.zip"],
        ["/a/caf\u00e9.zip", "/a/cafe\u0301.zip"],
        ["/a/" + "x" * 90 + "1.zip", "/a/" + "x" * 90 + "2.zip"],
        ["/a/\udcff.zip", "/a/\udcfe.zip", "/a/_.zip"],
    ],
)
def test_names_that_clean_to_one_are_told_apart_and_stay_the_same(paths):
    names = [submission.name for submission in name_all([Path(path) for path in paths])]

    assert len({name.casefold() for name in names}) == len(paths)
    assert [submission.name for submission in name_all([Path(path) for path in reversed(paths)])] == names[::-1]


def test_a_path_that_is_given_twice_is_one_submission():
    assert len(name_all([Path("/a/alice.zip"), Path("/a/./alice.zip")])) == 1


def test_parts_work_beside_each_other_but_not_beside_a_whole_run_nor_twice(tmp_path):
    def refused(part: str) -> None:
        with pytest.raises(InputError, match="is using this folder"), at_work(tmp_path, part):
            pass

    with at_work(tmp_path, "1-of-2"), at_work(tmp_path, "2-of-2"):
        refused("1-of-2")
        refused("")
    with at_work(tmp_path):
        refused("1-of-2")
        refused("")


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    code = "import os, sys; from pathlib import Path; from staff.grade.result_store import at_work\n"
    code += "with at_work(Path(sys.argv[1])) as scratch: print(scratch, flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    scratch_folder = Path(killed.stdout.strip())
    assert scratch_folder.is_dir()

    with at_work(tmp_path):
        assert not scratch_folder.exists()


def row(name: str, *outcomes: tuple[str, str, int, str], **run: Any) -> Row:
    """A row from (region, status, max_points, message)."""
    tests = [a_test(region, status, words, f"test_{region}", most) for region, status, most, words in outcomes]
    return a_row(*tests, name=name, **run)


def test_the_grade_book_has_a_column_for_each_task_and_region_and_runs_no_formula(tmp_path):
    rows = [row("=1+1", ("1.1", "passed", 3, ""), ("2a.3", "wrong", 7, "no"), notes=["@note"], wall_s=1.5)]

    gradebook.write_csv(tmp_path / "gradebook.csv", rows, COURSE)

    (line,) = csv.DictReader((tmp_path / "gradebook.csv").read_text().splitlines())
    assert (line["submission"], line["score"], line["max_score"], line["notes"]) == ("'=1+1", "3", "10", "'@note")
    assert (line["task 1"], line["task 2a"], line["1.1"], line["2a.3"], line["seconds"]) == ("3", "0", "3", "0", "1.5")


def test_equal_mistakes_are_counted_together_whatever_their_numbers():
    def wrong(name, number, seed):
        seeded = f" (inputs drawn with seed {seed}; use --seed {seed} to repeat them)"
        return row(name, ("1.2", "wrong", 3, f"expected 1, got {number}{seed and seeded}"), ("1.3", "skipped", 1, "x"))

    groups = gradebook.mistakes([wrong("a", 2.5, 77), row("b", ("1.2", "wrong", 3, "else")), wrong("c", -3e-7, 8)])

    assert [mistake.names for mistake in groups] == [("a", "c"), ("b",)]
    assert groups[0].message == "expected 1, got 2.5"


def test_a_regions_share_tells_all_some_none_and_not_attempted():
    def two(first, second):
        return row("x", ("1.1", first, 2, ""), ("1.1", second, 1, ""))

    (share,) = gradebook.regions(
        [two("passed", "passed"), two("passed", "wrong"), two("wrong", "skipped"), two(*["not attempted"] * 2)], COURSE
    )

    assert (share.full, share.some, share.none, share.untried) == (1, 1, 1, 1)
    assert (share.max_points, share.mean) == (3, 1.25)


@pytest.mark.parametrize("points, name", [(100, "90–100 %"), (87, "80–90 %"), (0, "0–10 %")])
def test_a_score_is_in_its_bin_and_full_marks_in_the_last(points, name):
    bins = gradebook.histogram([row("x", ("1.1", "passed", points, ""), ("1.2", "wrong", 100 - points, ""))])

    assert [name for name, count in bins if count] == [name]


def test_what_a_terminal_could_trip_over_is_written_as_an_escape():
    assert texts.printable("a\x1b[31m\u202eb\udcff\n") == "a\\x1b[31m\\u202eb\\udcff\n"


@pytest.fixture(scope="module")
def class_of_three(tmp_path_factory) -> Path:
    """A solution, nothing solved, and a broken zip, each with the one region that the quick grader looks at."""
    folder = tmp_path_factory.mktemp("class")
    hand_in(folder / "solved", HOME, text=(ROOT / HOME).read_text())
    hand_in(folder / "unsolved", HOME, text=clean_files()[HOME].decode())
    (folder / BROKEN).with_suffix(".zip").write_bytes(b"PK")
    return folder


def command(folder: Path, out: Path) -> list[str]:
    paths = [str(path) for path in sorted(folder.iterdir())]
    return [sys.executable, "-m", "staff.grade", *paths, "--out", str(out), "--jobs", "1", "--tests", QUICK]


@pytest.mark.medium
def test_a_bad_submission_with_a_name_that_the_terminal_cannot_show_stops_neither_the_others_nor_a_restart(
    class_of_three, tmp_path
):
    def run() -> dict[str, Any]:
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        process = subprocess.run(command(class_of_three, tmp_path), cwd=ROOT, env=environment, capture_output=True)
        assert (process.returncode, process.stderr) == (0, b"")
        return json.loads(process.stdout.splitlines()[-1])

    figures = run()

    reports = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("hand_ins/*/report.json")}
    assert (figures["submissions"], figures["graded"], figures["unreadable"]) == (3, 3, 1)
    assert {name: report["score"] for name, report in reports.items()} == {"solved": 2, "unsolved": 0, BROKEN: 0}
    assert {report["max_score"] for report in reports.values()} == {2}
    assert set(reports["solved"]) == {"submission", "score", "max_score", "tests", "environment", "sandbox"}
    assert [test["status"] for report in reports.values() for test in report["tests"]].count("not attempted") == 1
    assert "cannot be read" in reports[BROKEN]["tests"][0]["message"]
    assert all((tmp_path / file).exists() for file in ("index.html", f"hand_ins/{BROKEN}/index.html"))
    assert len((tmp_path / "gradebook.csv").read_text(encoding="utf-8").splitlines()) == 4
    again = run()
    assert (again["graded"], again["kept"]) == (0, 3)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory) -> list[dict[str, Any]]:
    return hand_ins.collect(tmp_path_factory.mktemp("catalogue"), [QUICK])


EXCEL = 32_767  # characters of a cell
NOT_RUN = Outcome(0, False, 0.0, 0.0, 0, "")


@pytest.fixture
def grading(tmp_path, monkeypatch, catalogue) -> Iterator[Grading]:
    """A run over a class into tmp_path/out. No grader is started: hand-ins whose graders said nothing."""
    monkeypatch.setattr(hand_ins, "collect", lambda *_: catalogue)
    monkeypatch.setattr(hand_ins, "run_graded", lambda *_, **__: NOT_RUN)
    with at_work(tmp_path / "out") as scratch:
        yield Grading.prepare(tmp_path / "out", scratch, [QUICK], seed=None, deadline=120)


def test_only_a_submission_that_has_changed_is_graded_again_with_a_seed_of_its_own_in_its_report(
    grading, tmp_path, monkeypatch
):
    drawn: list[int] = []
    monkeypatch.setattr(hand_ins, "run_graded", lambda *_, seed, **__: drawn.append(seed) or NOT_RUN)
    submission = Submission("mine", hand_in(tmp_path / "mine", HOME))

    first = [grading.grade(submission)[1], grading.grade(submission)[1]]
    reported = [result_store.read(grading.out, "mine").report["environment"]["seed"]]
    hand_in(tmp_path / "mine", HOME, text="x = 1\n")
    second = [grading.grade(submission)[1], grading.grade(submission)[1]]

    assert (first, second) == ([True, False], [True, False])
    reported.append(result_store.read(grading.out, "mine").report["environment"]["seed"])
    assert reported == drawn and drawn[0] != drawn[1]
    assert not os.listdir(grading.scratch)


def test_a_fault_of_the_grader_costs_one_submission_and_is_said(grading, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hand_ins, "run_graded", lambda *_, **__: 1 / 0)
    submissions = [Submission("in", hand_in(tmp_path / "in", HOME)), Submission("none", tmp_path / "no")]

    assert whole_class.grade_all(grading, submissions, 2) == {"none": True}
    assert "in: not graded" in capsys.readouterr().err


def test_the_notes_of_one_hand_in_are_few_and_short():
    notes = texts.notes(["\u202e" * 900] * 400)

    assert len(notes) == 20 and notes[-1] == "381 more notes"
    assert max(map(len, notes)) < 600


def test_three_measured_times_that_hand_ins_share_are_on_the_page_of_the_class(grading, tmp_path):
    names = ("ann", "bob", "cy")
    for name in names:
        hand_in(tmp_path / name, HOME)
        hand_in(tmp_path / name, "report.md", text="A step takes 12.345 ± 0.678 s, without the network 8.5 ± 0.5 s.")
    times = (
        '{"seconds": 1.2345678, "mean_time": 2.3456789, "step_seconds": 4.5678912, "time_left": 3.25, "x": 5.678912}'
    )
    for name in names[:2]:
        hand_in(tmp_path / name, "task1/runs/a.json", text=times)

    whole_class.grade_all(grading, [Submission(name, tmp_path / name) for name in names], 1)
    write_class(grading.out, names, COURSE, "")

    page = (grading.out / "index.html").read_text(encoding="utf-8")
    section = page.split("Identical measurements in several submissions")[1].split("<h2>")[0]
    assert "ann, bob</td>" in section and "cy" not in section
    measured = [result_store.read(grading.out, name).run["measured"] for name in names[1:]]
    assert measured == [
        ["12.345 ± 0.678", "mean_time=2.345679", "seconds=1.234568", "step_seconds=4.567891"], ["12.345 ± 0.678"]
    ]  # fmt: skip


def affinity() -> list[str]:
    return [str(processor) for processor in os.sched_getaffinity(0)]


def test_no_cell_is_longer_than_a_spreadsheet_takes_whatever_was_kept(tmp_path):
    flags = [{"file": "x" * 300, "line": number, "what": ""} for number in range(500)]

    gradebook.write_csv(tmp_path / "book.csv", [row("x", notes=["n" * 900_000], flags=flags)], COURSE)

    (line,) = csv.DictReader((tmp_path / "book.csv").read_text().splitlines())
    assert all(len(cell) <= EXCEL for cell in line.values())


def test_what_cannot_be_told_or_shown_of_one_hand_in_costs_the_others_nothing(grading, tmp_path):
    both = [Submission(name, hand_in(tmp_path / name, HOME)) for name in ("bad", "good")]
    whole_class.grade_all(grading, both, 1)
    damaged = result_store.folder_of(grading.out, "bad") / "run.json"
    damaged.write_text(json.dumps({"digest": json.loads(damaged.read_text())["digest"], "notes": 7}))

    graded_now = whole_class.grade_all(grading, both, 1)
    rows = write_class(grading.out, ["bad", "good"], COURSE, "")

    assert graded_now == {"bad": False, "good": False}
    assert [row["name"] for row in rows] == ["good"]


@pytest.mark.parametrize(
    "jobs, shares",
    [(1, [{4, 6, 8}]), (2, [{4, 8}, {6}]), (3, [{4}, {6}, {8}]), (5, [{4}, {6}, {8}, {4}, {6}])],
)
def test_the_processors_are_divided_among_the_jobs_and_shared_evenly_where_there_are_more_jobs(jobs, shares):
    assert whole_class.processors_of_jobs([4, 6, 8], jobs) == shares


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_two_hand_ins_that_are_graded_at_once_have_no_processor_in_common(grading, tmp_path, monkeypatch):
    both_run, processors = threading.Barrier(2, timeout=60), []

    def run_graded(*_: object, **__: object) -> Outcome:
        both_run.wait()
        command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        processors.append({*subprocess.check_output(command, text=True).split(), *run_apart(affinity, seconds=60)})
        return NOT_RUN

    monkeypatch.setattr(hand_ins, "run_graded", run_graded)

    whole_class.grade_all(grading, [Submission(name, hand_in(tmp_path / name, HOME)) for name in ("a", "b")], 2)

    first, second = processors
    assert first and second and not first & second


def test_a_submission_that_is_not_there_is_said_before_anything_is_graded(tmp_path):
    with pytest.raises(InputError, match="check the path"):
        whole_class.main([str(tmp_path / "nobody.zip"), "--out", str(tmp_path / "out")])
