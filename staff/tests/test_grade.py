"""Tests of the grading of a class: what is taken of a hand-in, what is kept, and that nothing is lost or done twice."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from staff.grade import gradebook, result_store, texts, whole_class
from staff.grade.class_files import write_class
from staff.grade.gradebook import Row
from staff.grade.hand_ins import Grading
from staff.grade.own_process import run_apart
from staff.grade.result_store import at_work
from staff.grade.submissions import Submission, Taken, choose, clean_files, name_all, open_submission, write_tree
from staff.sandbox.graded_run import Outcome

COURSE = load_course()
QUICK = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
HOME = "common/data_partition.py"


def hand_in(folder: Path, *files: str, text: str = "pass\n") -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def test_the_courses_folder_names_are_taken_for_ours(tmp_path):
    hand_in(tmp_path, "task2a/run_glue.py", "Task3/run_glue.py", "pipeline/pipe.py", "task2b/mine/helper.py")

    taken = choose(tmp_path, COURSE)

    assert set(taken.files) == {
        "task2a_gather_scatter/run_glue.py",
        "task3_ddp/run_glue.py",
        "pipeline/pipe.py",
        "task2b_allreduce/mine/helper.py",
    }


def test_a_folder_around_the_courses_folders_is_looked_through(tmp_path):
    hand_in(tmp_path, "notes.txt", "group 3/final/task1/run_glue.py", "group 3/final/common/schedule.py")

    assert set(choose(tmp_path, COURSE).files) == {"task1_single/run_glue.py", "common/schedule.py"}


def test_only_what_a_student_may_change_is_taken(tmp_path):
    ours = [
        "common/data/glue.py",
        "grader/ranks/one_run.py",
        "tests/conftest.py",
        "conftest.py",
        "pytest.ini",
        "torch.py",
        "course.toml",
    ]
    hand_in(tmp_path, "task1_single/run_glue.py", HOME, *ours)

    assert set(choose(tmp_path, COURSE).files) == {"task1_single/run_glue.py", HOME}


def test_a_task_handed_in_twice_is_said(tmp_path):
    hand_in(tmp_path, "task1/run_glue.py", "task1_single/run_glue.py")

    taken = choose(tmp_path, COURSE)

    assert list(taken.files) == ["task1_single/run_glue.py"]
    assert "task1_single/run_glue.py was also submitted" in taken.notes[0]


def test_what_is_not_handed_in_is_the_handouts_and_not_the_solution(tmp_path):
    hand_in(tmp_path / "in", "task1/run_glue.py", text="mine = 1\n")
    clean = clean_files()

    write_tree(clean, choose(tmp_path / "in", COURSE), tmp_path / "tree")

    assert (tmp_path / "tree/task1_single/run_glue.py").read_text() == "mine = 1\n"
    assert "raise NotImplementedError" in (tmp_path / "tree/task2a_gather_scatter/run_glue.py").read_text()
    assert not any("SOLUTION" in path.read_text() for path in (tmp_path / "tree").rglob("*.py"))
    assert "[hidden]" not in (tmp_path / "tree/course.toml").read_text()


def test_the_clean_tree_of_a_handout_is_the_handout(tmp_path):
    clean = clean_files()
    write_tree(clean, Taken({}), tmp_path)

    assert clean_files(tmp_path) == clean


def test_a_submission_cannot_write_into_the_next_ones_tree(tmp_path):
    clean = clean_files()
    write_tree(clean, Taken({}), tmp_path / "first")
    (tmp_path / "first" / HOME).write_text("poisoned\n")

    write_tree(clean, Taken({}), tmp_path / "second")

    assert (tmp_path / "second" / HOME).read_bytes() == clean[HOME]


def test_a_folder_in_place_of_a_file_is_said(tmp_path):
    hand_in(tmp_path / "in", f"{HOME}/inside.py", "pipeline/pipe.py/inside.py")

    with pytest.raises(InputError, match=r"pipe\.py/inside\.py: expected a file of the course"):
        write_tree(clean_files(), choose(tmp_path / "in", COURSE), tmp_path / "tree")


def test_a_hand_in_without_the_courses_folders_is_said(tmp_path):
    hand_in(tmp_path / "in", "report.txt")

    with pytest.raises(InputError, match="expected the folders of the course"):
        open_submission(tmp_path / "in", tmp_path / "out", COURSE)


def test_submissions_are_named_after_folders_and_zips():
    named = name_all(
        [Path("/x/alice.zip"), Path("/x/bob"), Path("/y/hand in.ZIP"), Path("/y/carol/hw.zip"), Path("/y/dan/hw.zip")]
    )

    assert [submission.name for submission in named] == ["alice", "bob", "hand_in", "carol-hw", "dan-hw"]


@pytest.mark.parametrize("name", ["..", "a\nb", "\udcff", "x" * 300, "<b>", "."])
def test_every_name_can_be_a_folder_and_a_cell(name):
    (submission,) = name_all([Path("/x") / f"{name}.zip"])

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


def test_the_longest_name_can_be_made_on_a_file_system(tmp_path):
    (submission,) = name_all([Path("/a") / ("\U00020000" * 100)])

    (tmp_path / submission.name).mkdir()


def test_two_graders_do_not_share_a_folder_of_results(tmp_path):
    with at_work(tmp_path / "out"):
        with pytest.raises(InputError, match="is using this folder"), at_work(tmp_path / "out"):
            pass


def test_parts_work_beside_each_other_but_not_beside_a_whole_run_nor_twice(tmp_path):
    with at_work(tmp_path, "1-of-2"), at_work(tmp_path, "2-of-2"):
        for other in ("1-of-2", ""):
            with pytest.raises(InputError, match="is using this folder"), at_work(tmp_path, other):
                pass


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    code = "import os, sys; from pathlib import Path; from staff.grade.result_store import at_work\n"
    code += "with at_work(Path(sys.argv[1])) as scratch: print(scratch, flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    assert left.is_dir()

    with at_work(tmp_path):
        assert not left.exists()


def row(name: str, *tests: tuple[str, str, int, str], **run: Any) -> Row:
    """A row from (region, status, max_points, message)."""
    told: list[dict[str, Any]] = [
        {"id": f"tests/t.py::test_{region}", "task": region.split(".")[0], "region": region, "status": status,
         "points": most if status == "passed" else 0, "max_points": most, "message": message}
        for region, status, most, message in tests
    ]  # fmt: skip
    score, most = (sum(test[key] for test in told) for key in ("points", "max_points"))
    report = {"submission": name, "score": score, "max_score": most, "tests": told, "environment": {}, "sandbox": {}}
    return Row(report, {"notes": [], "unreadable": False, "output": {}, **run})


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

    found = gradebook.mistakes([wrong("a", 2.5, 77), row("b", ("1.2", "wrong", 3, "else")), wrong("c", -3e-7, 8)])

    assert [mistake.names for mistake in found] == [("a", "c"), ("b",)]
    assert found[0].message == "expected 1, got 2.5"


def test_a_regions_share_tells_all_some_none_and_not_attempted():
    def two(first, second):
        return row("x", ("1.1", first, 2, ""), ("1.1", second, 1, ""))

    (share,) = gradebook.regions(
        [two("passed", "passed"), two("passed", "wrong"), two("wrong", "skipped"), two(*["not attempted"] * 2)], COURSE
    )

    assert (share.full, share.some, share.none, share.untried) == (1, 1, 1, 1)
    assert (share.max_points, share.mean) == (3, 1.25)


def test_full_marks_are_in_the_last_bin():
    bins = gradebook.histogram([row("x", ("1.1", "passed", 3, "")), row("y", ("1.1", "wrong", 3, ""))])

    assert (bins[0][1], bins[-1][1]) == (1, 1)


def test_a_score_of_87_percent_is_in_the_bin_from_80_to_90():
    bins = gradebook.histogram([row("x", ("1.1", "passed", 87, ""), ("1.2", "wrong", 13, ""))])

    assert [name for name, count in bins if count] == ["80–90 %"]


def test_what_a_terminal_could_trip_over_is_written_as_an_escape():
    assert texts.printable("a\x1b[31m\u202eb\udcff\n") == "a\\x1b[31m\\u202eb\\udcff\n"


@pytest.fixture(scope="module")
def class_of_three(tmp_path_factory) -> Path:
    """A solution, nothing solved, and a broken zip, each with the one region that the quick grader looks at."""
    folder = tmp_path_factory.mktemp("class")
    for name, content in (("solved", (ROOT / HOME).read_bytes()), ("unsolved", clean_files()[HOME])):
        (folder / name / "common").mkdir(parents=True)
        (folder / name / HOME).write_bytes(content)
    with zipfile.ZipFile(folder / "broken.zip", "w") as opened:
        opened.write(folder / "solved" / HOME, HOME)
    (folder / "broken.zip").write_bytes((folder / "broken.zip").read_bytes()[:400])
    return folder


def command(folder: Path, out: Path) -> list[str]:
    paths = [str(path) for path in sorted(folder.iterdir())]
    return [sys.executable, "-m", "staff.grade", *paths, "--out", str(out), "--jobs", "1", "--tests", QUICK]


@pytest.mark.medium
def test_a_bad_submission_does_not_stop_the_others(class_of_three, tmp_path):
    done = subprocess.run(command(class_of_three, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=300)

    figures = json.loads(done.stdout.splitlines()[-1])
    reports = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("hand_ins/*/report.json")}
    assert done.returncode == 0 and not done.stderr
    assert (figures["submissions"], figures["graded"], figures["unreadable"]) == (3, 3, 1)
    assert {name: report["score"] for name, report in reports.items()} == {"solved": 2, "unsolved": 0, "broken": 0}
    assert {report["max_score"] for report in reports.values()} == {2}
    assert set(reports["solved"]) == {"submission", "score", "max_score", "tests", "environment", "sandbox"}
    assert [test["status"] for report in reports.values() for test in report["tests"]].count("not attempted") == 1
    assert "cannot be read" in reports["broken"]["tests"][0]["message"]
    assert all((tmp_path / file).exists() for file in ("gradebook.csv", "index.html", "hand_ins/broken/index.html"))


@pytest.mark.proof  # of make test: a part that is killed and restarted, test_parts.py
def test_a_killed_run_is_gone_on_with_and_nothing_is_lost_or_graded_twice(class_of_three, tmp_path):
    first = subprocess.Popen(command(class_of_three, tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 240
    while not (tmp_path / "hand_ins/solved/report.json").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("hand_ins/*/report.json")}
    assert 1 <= len(done) < 3

    second = subprocess.run(command(class_of_three, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=300)

    figures = json.loads(second.stdout.splitlines()[-1])
    assert (figures["kept"], figures["graded"]) == (len(done), 3 - len(done))
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    assert len(list(tmp_path.glob("hand_ins/*/report.json"))) == 3


@pytest.mark.medium
def test_only_a_submission_that_has_changed_is_graded_again(class_of_three, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(class_of_three / "solved", mine)
    with at_work(tmp_path / "out") as scratch:
        grading = Grading.prepare(tmp_path / "out", scratch, [QUICK], seed=1, deadline=120)

        first = [grading.grade(Submission("mine", mine)) for _ in range(2)]
        (mine / HOME).write_bytes(clean_files()[HOME])
        second = [grading.grade(Submission("mine", mine)) for _ in range(2)]

        assert (first, second) == ([True, False], [True, False])
        assert grading.read("mine").report["score"] == 0
        assert not os.listdir(scratch) or os.listdir(scratch) == ["catalogue.json"]


def test_a_fault_of_the_grader_costs_one_submission_and_is_said(tmp_path, monkeypatch, capsys):
    hand_in(tmp_path / "in", HOME)
    monkeypatch.setattr("staff.grade.hand_ins.run_graded", lambda *_, **__: 1 / 0)
    with at_work(tmp_path / "out") as scratch:
        grading = Grading.prepare(tmp_path / "out", scratch, [QUICK], seed=1, deadline=1)

        done = whole_class.grade_all(
            grading, [Submission("in", tmp_path / "in"), Submission("none", tmp_path / "no")], 2
        )

    assert done == {"none": True}
    assert "in: not graded" in capsys.readouterr().err


EXCEL = 32_767  # characters of a cell
NOT_RUN = Outcome(0, False, 0.0, 0.0, 0, "")


def test_each_hand_in_has_inputs_of_its_own_and_their_seed_in_its_report(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("staff.grade.hand_ins.run_graded", lambda *_, seed, **__: drawn.append(seed) or NOT_RUN)
    with at_work(tmp_path / "out") as scratch:
        grading = Grading.prepare(tmp_path / "out", scratch, [QUICK], seed=None, deadline=1)
        for name in ("first", "second"):
            hand_in(tmp_path / name, HOME)
            grading.grade(Submission(name, tmp_path / name))

        reported = [grading.read(name).report["environment"]["seed"] for name in ("first", "second")]

    assert reported == drawn
    assert drawn[0] != drawn[1]


def test_a_grade_book_with_the_longest_notes_can_be_read_by_a_spreadsheet(tmp_path, monkeypatch):
    long = "\u202e" * 60
    names = [f"{folder}/{number:03}{long}.py" for folder in ("task1", "task1_single") for number in range(400)]
    hand_in(tmp_path / "in", HOME, *names)
    monkeypatch.setattr("staff.grade.hand_ins.run_graded", lambda *_, **__: NOT_RUN)
    with at_work(tmp_path / "out") as scratch:
        grading = Grading.prepare(tmp_path / "out", scratch, [QUICK], seed=1, deadline=1)

        whole_class.grade_all(grading, [Submission("in", tmp_path / "in")], 1)
        write_class(tmp_path / "out", ["in"], COURSE, "")

    (row,) = csv.DictReader((tmp_path / "out/gradebook.csv").read_text(encoding="utf-8").splitlines())
    assert max(map(len, row.values())) <= EXCEL
    assert "was ignored because" in row["notes"] and "381 more notes" in row["notes"]
    assert len(gradebook_notes(tmp_path / "out", "in")) == 20


def affinity() -> list[str]:
    return [str(processor) for processor in os.sched_getaffinity(0)]


def gradebook_notes(out: Path, name: str) -> list[str]:
    return result_store.read(out, name).run["notes"]


def test_no_cell_is_longer_than_a_spreadsheet_takes_whatever_was_kept(tmp_path):
    flags = [{"file": "x" * 300, "line": number, "what": ""} for number in range(500)]

    gradebook.write_csv(tmp_path / "book.csv", [row("x", notes=["n" * 900_000], flags=flags)], COURSE)

    (line,) = csv.DictReader((tmp_path / "book.csv").read_text().splitlines())
    assert all(len(cell) <= EXCEL for cell in line.values())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_name_that_the_terminal_cannot_show_ends_neither_a_run_nor_its_restart(tmp_path, encoding):
    names = ["\u6f22\u5b57.zip", "other.zip"]  # not readable as zips: their graders need not run
    for name in names:
        (tmp_path / name).write_bytes(b"")
    command = [sys.executable, "-m", "staff.grade", *[tmp_path / name for name in names], "--tests", QUICK]
    for graded in (2, 0):
        done = subprocess.run(
            [*command, "--out", tmp_path / "out"],
            cwd=ROOT,
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )

        assert done.returncode == 0, done.stderr.decode()
        assert json.loads(done.stdout.splitlines()[-1])["graded"] == graded
        assert len((tmp_path / "out/gradebook.csv").read_text(encoding="utf-8").splitlines()) == 3


def test_what_cannot_be_told_or_shown_of_one_hand_in_costs_the_others_nothing(tmp_path, monkeypatch, capsys):
    for name in ("bad", "good"):
        hand_in(tmp_path / name, HOME)
    monkeypatch.setattr("staff.grade.hand_ins.run_graded", lambda *_, **__: NOT_RUN)
    with at_work(tmp_path / "out") as scratch:
        grading = Grading.prepare(tmp_path / "out", scratch, [QUICK], seed=1, deadline=1)
        both = [Submission(name, tmp_path / name) for name in ("bad", "good")]
        whole_class.grade_all(grading, both, 1)
        damaged = result_store.folder_of(tmp_path / "out", "bad") / "run.json"
        damaged.write_text(json.dumps({"digest": json.loads(damaged.read_text())["digest"], "notes": 7}))

        done = whole_class.grade_all(grading, both, 1)
        rows = write_class(tmp_path / "out", ["bad", "good"], COURSE, "")

    assert done == {"bad": False, "good": False}
    assert [row["name"] for row in rows] == ["good"]


@pytest.mark.parametrize("jobs", [1, 2, 3, 8])
def test_the_processors_are_divided_among_the_jobs(jobs):
    shares = whole_class.processors_of_jobs(range(8), jobs)

    assert sorted(processor for share in shares for processor in share) == list(range(8))


def test_more_jobs_than_processors_share_them_evenly():
    assert whole_class.processors_of_jobs([4, 6], 5) == [{4}, {6}, {4}, {6}, {4}]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_two_hand_ins_that_are_graded_at_once_have_no_processor_in_common(tmp_path, monkeypatch):
    both_run, seen = threading.Barrier(2, timeout=60), []

    def run_graded(*_: object, **__: object) -> Outcome:
        both_run.wait()
        asked = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        seen.append({*subprocess.check_output(asked, text=True).split(), *run_apart(affinity, seconds=60)})
        return NOT_RUN

    monkeypatch.setattr("staff.grade.hand_ins.run_graded", run_graded)
    for name in ("a", "b"):
        hand_in(tmp_path / name, HOME)
    with at_work(tmp_path / "out") as scratch:
        grading = Grading.prepare(tmp_path / "out", scratch, [QUICK], seed=1, deadline=1)

        whole_class.grade_all(grading, [Submission(name, tmp_path / name) for name in ("a", "b")], 2)

    first, second = seen
    assert first and second and not first & second


def test_a_submission_that_is_not_there_is_said_before_anything_is_graded(tmp_path):
    with pytest.raises(InputError, match="check the path"):
        whole_class.main([str(tmp_path / "nobody.zip"), "--out", str(tmp_path / "out")])
