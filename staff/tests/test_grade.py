"""`python -m staff.grade` on a small class: what is kept and shown, what is graded again, what ends at its limits."""

import csv
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.graded_tests import GradedTest, marked
from course.table import load_course
from course.todo import find_blocks, replace_block
from course.zip_files import write_zip
from grader.report import Entry
from grader.weights import Weights
from staff.grade import result_store, whole_class
from staff.grade.class_files import write_class
from staff.grade.gradebook import GradedHandIn
from staff.grade.hand_ins import _without_texts
from staff.grade.hidden_tests import contradictions, hidden_files
from staff.grade.result_store import at_work
from staff.grade.submissions import clean_files, name_all, write_files
from staff.grade.whole_class import in_part
from staff.gradescope.results import results
from staff.proofs.bank import solved_files

COURSE = load_course()
HOME, MODEL, AVERAGING = "common/data_partition.py", "beyond/cost_model.py", "task2b_allreduce/run_glue.py"
QUICK = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
TESTS = [
    QUICK,
    "tests/task2b/test_partitions.py::test_use_gives_the_same_partition_every_time",
    "tests/gradients/test_averaging.py::test_all_reduce_leaves_the_mean_on_every_worker",
    "tests/beyond/test_cost_model.py",
]
ODD = "\u6f22\u5b57"  # a name that the terminal cannot show
SHARED = '{"seconds": 1.2345678, "mean_time": 2.3456789, "step_seconds": 4.5678912, "time_left": 3.25, "x": 5.678912}'
WRONG = """
import os
raise RuntimeError(f"runs on {len(os.sched_getaffinity(0))} processors")
"""
HELPER = """
import torch.distributed as dist

def average(model, world_size):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
"""
USES_IT = "from task2b_allreduce.mine.deep.helper import average\n\naverage(model, world_size)"


def hand_ins(folder: Path) -> list[Path]:
    """A solution that is zipped in folders of its own, one that needs a file of its own in nested folders, one that
    fails, nothing, and a zip that is none."""
    solved = {name: solved_files()[name] for name in (HOME, MODEL, AVERAGING)}
    write_zip({f"group 3/final/{name}": text for name, text in solved.items()}, folder / "solved.zip")
    text = solved[AVERAGING].decode()
    block = next(block for block in find_blocks(text) if block.id == "2b.1")
    nested = {
        AVERAGING: replace_block(text, block, USES_IT),
        "task2b/mine/deep/helper.py": HELPER,
        "task1/a.json": SHARED,
    }
    write_files({name: text.encode() for name, text in nested.items()}, folder / "nested")
    write_files({HOME: WRONG.encode(), "task1/b.json": SHARED.encode()}, folder / "wrong")
    write_files({HOME: clean_files()[HOME]}, folder / "nothing")
    (folder / f"{ODD}.zip").write_bytes(b"PK")
    return sorted(folder.iterdir())


def command(paths: list[Path], out: Path, *flags: str) -> tuple[dict[str, Any], subprocess.CompletedProcess]:
    """The figures of a run in two jobs, on a terminal that knows ASCII alone, whose files nobody else may read."""
    words = [sys.executable, "-m", "staff.grade", *map(str, paths), "--out", str(out), "--jobs", "2", *flags]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COS598D_SLOWNESS": "30"}
    process = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, umask=0o077)
    return json.loads(process.stdout.splitlines()[-1]), process


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> dict[str, Any]:
    """A class after its first run: the hand-ins, the folder of results, the figures and the rows of the grade book."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "in").mkdir()
    paths = hand_ins(folder / "in")
    figures, process = command(paths, folder / "out", "--tests", *TESTS)
    assert (process.returncode, process.stderr) == (0, "")
    rows = csv.DictReader((folder / "out/gradebook.csv").read_text(encoding="utf-8").splitlines())
    return {"paths": paths, "out": folder / "out", "figures": figures, "rows": {row["submission"]: row for row in rows}}


def report(graded: dict[str, Any], name: str) -> dict[str, Any]:
    return result_store.read(graded["out"], name).report


@pytest.mark.medium
def test_every_hand_in_gets_its_points_wherever_its_files_lie(graded):
    scores = {name: (row["score"], row["bonus"]) for name, row in graded["rows"].items()}
    statuses = {name: {test["status"] for test in report(graded, name)["tests"]} for name in scores}

    assert {name: score for name, score in scores.items() if score != ("0", "0")} == {
        "solved": ("5", "4"), "nested": ("1", "0")
    }  # fmt: skip
    assert statuses["solved"] == {"passed"} and statuses["nothing"] == {"not attempted"}
    assert statuses[ODD] == {"crashed"} and "cannot be read" in graded["rows"][ODD]["notes"]
    assert {key: graded["figures"][key] for key in ("submissions", "graded", "kept", "unreadable", "class")} == {
        "submissions": 5, "graded": 5, "kept": 0, "unreadable": 1, "class": 5
    }  # fmt: skip


@pytest.mark.medium
def test_an_unreadable_hand_in_says_why_in_every_field_and_gets_no_hints(graded):
    row = result_store.read(graded["out"], ODD)
    page = (graded["out"] / "hand_ins" / ODD / "index.html").read_text(encoding="utf-8")
    on_gradescope = [test["output"] for test in results(row, COURSE, late=None, seconds=1)["tests"]]

    assert all("cannot be read" in test[field] for test in row.tests for field in ("cause", "kind", "message"))
    assert not [test["observed"] for test in row.tests if test["observed"]]
    assert "cannot be read" in page and "Look here first" not in page and "Hint" not in page
    assert "cannot be read" in on_gradescope[0] and not [text for text in on_gradescope if "Hint" in text]


@pytest.mark.medium
def test_the_sums_of_the_grade_book_are_those_of_its_columns_and_of_the_reports(graded):
    for name, row in graded["rows"].items():
        tests = report(graded, name)["tests"]
        for column in (*COURSE.regions, *(f"task {id}" for id in COURSE.tasks)):
            key, _, value = column.rpartition(" ")
            assert int(row[column]) == sum(test["points"] for test in tests if test[key or "region"] == value), column
        for total, is_bonus in (("score", False), ("bonus", True)):
            tasks = [id for id in COURSE.tasks if (id in COURSE.bonus_tasks) == is_bonus]
            regions = [id for id, region in COURSE.regions.items() if region.bonus == is_bonus]
            assert int(row[total]) == sum(int(row[f"task {id}"]) for id in tasks) == sum(int(row[id]) for id in regions)
    assert {(row["max_score"], row["max_bonus"]) for row in graded["rows"].values()} == {("5", "4")}


@pytest.mark.medium
def test_the_page_of_the_class_has_its_mean_its_mistakes_its_regions_and_shared_measurements(graded):
    page = (graded["out"] / "index.html").read_text(encoding="utf-8")
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())

    assert "Mean 1.2, median 0 of 5 points" in text and "1 could not be read" in text
    assert re.search(r"b\.15 \D+ 0\.5 of 2 1 0 0 3 ", text), "one of the four that can be read has all points"
    assert "1 of 4 2b.2" in text and "processors" in text
    assert "nested, wrong 3 mean_time=2.345679" in text
    for name in graded["rows"]:
        assert (graded["out"] / "hand_ins" / name / "index.html").read_text().count("of 5 points")


@pytest.mark.medium
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_hand_in_runs_on_the_processors_of_its_job(graded):
    processors = len(os.sched_getaffinity(0))
    messages = " ".join(test["message"] for test in report(graded, "wrong")["tests"])

    shares = {int(number) for number in re.findall(r"runs on (\d+) processors", messages)}
    assert shares and shares <= {processors // 2, processors - processors // 2}


@pytest.mark.medium
def test_only_what_has_changed_is_graded_again_with_another_seed_and_what_cannot_be_kept_costs_nobody_else(graded):
    out, paths = graded["out"], graded["paths"]
    before = report(graded, "nothing")["environment"]["seed"]
    write_files({HOME: clean_files()[HOME] + b"\n# changed\n"}, paths[0].parent / "nothing")
    write_files({HOME: b""}, paths[0].parent / "late")
    (out / "hand_ins/late").write_text("where its results should go")

    figures, process = command([*paths, paths[0].parent / "late"], out, "--tests", *TESTS)

    assert (figures["graded"], figures["kept"], figures["not_graded"], process.returncode) == (1, 4, 1, 1)
    assert report(graded, "nothing")["environment"]["seed"] != before
    assert "late: not graded" in process.stderr
    assert len((out / "gradebook.csv").read_text(encoding="utf-8").splitlines()) == 6


@pytest.mark.medium
def test_grading_one_late_hand_in_keeps_the_rows_of_all_others(graded):
    late = graded["paths"][0].parent / "very late"
    write_files({HOME: b""}, late)

    (late.parent.parent / "roster.csv").write_text("id,name,partners\nsolved,Ann,\nvery,Bob,\ncy,Cy,solved\n")

    figures, process = command(
        [late], graded["out"], "--tests", QUICK, "--roster", str(late.parent.parent / "roster.csv")
    )

    people = csv.DictReader((graded["out"] / "grades.csv").read_text(encoding="utf-8").splitlines())
    assert [(one["name"], one["hand-in"], one["score"]) for one in people][:3] == [
        ("Ann", "solved", "5"), ("Bob", "very_late", "0"), ("Cy", "solved", "5")
    ]  # fmt: skip
    rows = list(csv.DictReader((graded["out"] / "gradebook.csv").read_text(encoding="utf-8").splitlines()))
    names = [row["submission"] for row in rows]
    assert names == sorted({*graded["rows"], "very_late"}) and figures["class"] == len(names)
    assert next(row["score"] for row in rows if row["submission"] == "solved") == "5"
    assert f"1 of 1 graded, and {len(names) - 1} from earlier runs" in process.stdout


# --- regrading ---


def test_a_better_hint_regrades_nobody_and_other_points_do():
    text = (ROOT / "course.toml").read_text(encoding="utf-8")
    lines = text.splitlines()

    def decides(key: str, value: str) -> bool:
        number = next(number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
        changed = tomllib.loads("\n".join([*lines[:number], f"{key} = {value}", *lines[number + 1 :]]))
        return _without_texts(changed) != _without_texts(tomllib.loads(text))

    assert not decides("title", '"a better one"')
    assert decides("points", "99")
    table = tomllib.loads(text)
    next(iter(table["regions"].values()))["hints"] = []
    assert table != tomllib.loads(text) and _without_texts(table) == _without_texts(tomllib.loads(text))


@pytest.mark.medium
def test_a_hand_in_that_is_graded_again_keeps_its_seed_and_what_it_gained_or_lost_is_named_with_the_test(tmp_path):
    write_files({HOME: solved_files()[HOME]}, tmp_path / "ann")
    write_files({HOME: b""}, tmp_path / "bob")
    out, both = tmp_path / "out", [tmp_path / "ann", tmp_path / "bob"]

    def seeds_after(*flags: str) -> list[int]:
        command(both, out, *flags)
        return [result_store.read(out, name).report["environment"]["seed"] for name in ("ann", "bob")]

    def changes() -> list[dict[str, str]]:
        return list(csv.DictReader((out / "changes.csv").read_text(encoding="utf-8").splitlines()))

    first = seeds_after("--tests", *TESTS[:2])
    assert changes() == []

    assert seeds_after("--tests", QUICK) == first, "and fewer points"
    assert changes() == [] and "the earlier points are kept" in result_store.read(out, "ann").run["notes"][-1]
    figures, _ = command(both, out, "--tests", QUICK)
    assert figures["graded"] == 0, "it is known that they would be fewer"

    assert seeds_after("--tests", QUICK, "--allow-lower") == first
    (lost,) = changes()
    points = int(lost["score before"]) - int(lost["score now"])
    assert (lost["submission"], lost["test"], lost["region"]) == ("ann", TESTS[1], "2b.4")
    assert (lost["before"], lost["now"], lost["points"]) == ("passed", "no such test", f"-{points}") and points > 0
    assert lost["why"] == "the same hand-in"

    write_files({HOME: b""}, tmp_path / "ann")
    ann, bob = seeds_after("--tests", QUICK)
    assert ann != first[0] and bob == first[1], "students can read the seed of what they handed in before"
    assert [(line["submission"], line["why"]) for line in changes()] == [("ann", "another hand-in")]
    figures, _ = command([Path("bob")], out, "--solution", "2b.2", "--tests", QUICK)
    page = (out / "hand_ins/bob/index.html").read_text(encoding="utf-8")
    assert "your lines and a solution" in page and "+return self.data[self.index[index]]" in page
    assert (figures["graded"], figures["kept"]) == (1, 0), "named as in the grade book"
    assert seeds_after("--fresh-inputs", "--tests", *TESTS[:2])[1] != first[1]


@pytest.mark.medium
@pytest.mark.parametrize("unreadable, code", [(1, 0), (2, 1)])
def test_more_unreadable_hand_ins_than_a_fifth_are_a_warning_and_an_exit_code(tmp_path, unreadable, code):
    for number in range(5):
        if number < unreadable:
            (tmp_path / f"{number}.zip").write_bytes(b"not a zip")
        else:
            write_files({HOME: b""}, tmp_path / str(number))

    figures, process = command(sorted(tmp_path.iterdir()), tmp_path / "out", "--tests", QUICK)

    assert (figures["unreadable"], process.returncode) == (unreadable, code)
    assert process.stderr.startswith("warning: 2 of 5 cannot be read") == bool(code)


# --- hidden tests ---


@pytest.mark.medium
def test_hidden_points_are_in_the_grade_book_and_nowhere_that_the_student_can_read(tmp_path):
    write_files({HOME: solved_files()[HOME]}, tmp_path / "in")
    hidden = f"{hidden_files()[0]}::test_many_uneven_partitions_hold_every_example_once"

    command([tmp_path / "in"], tmp_path / "out", "--tests", "tests/task2b/test_partitions.py", hidden)

    row = result_store.read(tmp_path / "out", "in")
    of_hidden = [test for test in row.tests if test["id"] == hidden]
    assert [(test["status"], test["points"] >= 1) for test in of_hidden] == [("passed", True)]
    (in_book,) = csv.DictReader((tmp_path / "out/gradebook.csv").read_text(encoding="utf-8").splitlines())
    regions = {test["region"] for test in row.tests}
    whole = sum(COURSE.regions[id].points for id in regions)
    assert (in_book["score"], in_book["max_score"], in_book["2b.3"]) == (
        str(whole),
        str(whole),
        str(COURSE.regions["2b.3"].points),
    )
    report, page = ((tmp_path / "out/hand_ins/in" / name).read_text() for name in ("report.json", "index.html"))
    assert "uneven_partitions" not in report and "uneven partitions" not in page
    shown = whole - of_hidden[0]["points"]
    assert json.loads(report)["score"] == json.loads(report)["max_score"] == shown
    assert f"{shown} of {shown} points; hidden tests give the rest" in page


def test_every_hidden_test_has_a_point_of_its_region_whose_points_stay_the_same():
    hidden = {
        id: GradedTest(*values, **words)
        for file in hidden_files()
        for id, values, words in marked(ROOT, file, "graded")
    }
    weights = Weights(ROOT, COURSE)
    weights.take(COURSE, hidden)
    for region in {mark.region for mark in hidden.values()}:
        tests = [Entry(id, "", region, "passed") for id, mark in weights.tests.items() if mark.region == region]

        weights.set_points(COURSE, tests)

        assert sum(test.points for test in tests) == COURSE.regions[region].points
        assert all(test.max_points >= 1 for test in tests if test.id in hidden), region


@pytest.mark.parametrize(
    "values, words",
    [
        ({"visibility": "later"}, "hidden.visibility: expected one of"),
        ({"visibility": "visible"}, ""),
        ({"tests": [], "visibility": ""}, ""),
    ],
)
def test_a_visibility_that_is_none_is_said_before_anything_is_graded(values, words):
    lines = list(contradictions(replace(COURSE, hidden=COURSE.hidden | values)))

    assert [words in line for line in lines] == [True] * bool(words)


def test_a_region_with_no_more_points_than_hidden_tests_is_a_contradiction():
    region = replace(COURSE.regions["2b.3"], points=1)

    assert [line.split()[2] for line in contradictions(replace(COURSE, regions={"2b.3": region}))] == ["2b.3"]


@pytest.mark.medium
def test_a_deadline_that_is_given_wins_over_that_of_the_environment(tmp_path):
    write_files({HOME: b"while True:\n    pass\n"}, tmp_path / "in")

    command([tmp_path / "in"], tmp_path / "out", "--deadline", "3", "--tests", QUICK)

    row = result_store.read(tmp_path / "out", "in")
    assert row.run["notes"][-1] == "the graders were stopped after 3 s, before the last test"
    assert [test["status"] for test in row.tests] == ["timed out"]


def test_a_row_that_is_not_there_yet_or_damaged_is_named_and_the_others_are_shown(tmp_path):
    for name in ("ann", "bob", "cy"):
        kept: dict[str, object] = {"submission": name, "score": 1, "max_score": 2, "tests": []}
        run = {"notes": [], "flags": [], "output": {}, "unreadable": False, "wall_s": 1.0, "peak_pss_mb": None}
        result_store.keep(tmp_path, GradedHandIn(kept, run), kept, "page")
    (tmp_path / "hand_ins/bob/run.json").write_text("{")
    (tmp_path / "hand_ins/cy/run.json").write_text('{"notes": 7}')

    figures = write_class(tmp_path, ["ann", "bob", "cy", "dan"], COURSE, "")

    assert [row["name"] for row in figures] == ["ann"]
    assert "3 not graded yet: bob, cy, dan" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    "jobs, shares",
    [(1, [{4, 6, 8}]), (2, [{4, 8}, {6}]), (3, [{4}, {6}, {8}]), (5, [{4}, {6}, {8}, {4}, {6}])],
)
def test_the_processors_are_divided_among_the_jobs_and_shared_evenly_where_there_are_more_jobs(jobs, shares):
    assert whole_class.processors_of_jobs([4, 6, 8], jobs) == shares


def test_a_roster_with_a_date_without_a_zone_is_refused_before_anything_is_graded(tmp_path):
    (tmp_path / "roster.csv").write_text("id,due\nann,2026-02-13\n")

    with pytest.raises(InputError, match="a time with its zone"):
        whole_class.main([str(tmp_path), "--out", str(tmp_path / "out"), "--roster", str(tmp_path / "roster.csv")])

    assert not (tmp_path / "out").exists()


def test_a_submission_that_is_not_there_is_said_before_anything_is_graded(tmp_path):
    with pytest.raises(InputError, match="check the path"):
        whole_class.main([str(tmp_path / "nobody.zip"), "--out", str(tmp_path / "out")])


# --- parts, and runs that are killed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 16])
def test_every_submission_is_in_exactly_one_part_whatever_the_order(parts):
    named = name_all([Path(f"/x/student{number}.zip") for number in range(10)])

    of_parts = [in_part(named[::-1] if number % 2 else named, f"{number}/{parts}") for number in range(1, parts + 1)]

    assert sorted(s.name for part in of_parts for s in part) == sorted(s.name for s in named)


@pytest.mark.parametrize("part", ["0/4", "5/4", "3", "a/b", "1/0", "-1/4"])
def test_a_part_that_is_none_is_said(part):
    with pytest.raises(InputError, match="expected NUMBER/PARTS"):
        in_part([], part)


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


def start(hand_ins: Path, out: Path, part: int, python: str = sys.executable, **environment: str) -> subprocess.Popen:
    """One task of two of the array job, as SLURM starts it."""
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_ARRAY_TASK_ID": str(part), "SLURM_ARRAY_TASK_COUNT": "2"}
    variables = os.environ | slurm | {"OUT": str(out), "PYTHON": python, "SLURM_CPUS_PER_TASK": "1"} | environment
    words = ["bash", str(ROOT / "staff/slurm/grade_class.sbatch"), f"{hand_ins}/*", "--tests", QUICK, "--seed", "5"]
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("environment, parts", [({}, 2), ({"PARTS": "16"}, 16)])
def test_a_task_of_the_array_job_grades_its_part_of_all_hand_ins(tmp_path, environment, parts):
    for name in ("ann", "bob"):
        (tmp_path / "in" / name).mkdir(parents=True)

    words, _ = start(tmp_path / "in", tmp_path / "out", 2, python="echo", **environment).communicate()

    paths = f"{tmp_path}/in/ann {tmp_path}/in/bob"
    assert words == f"-m staff.grade {paths} --out {tmp_path}/out --part 2/{parts} --jobs 1 --tests {QUICK} --seed 5\n"


@pytest.mark.proof
def test_parts_at_once_with_one_killed_and_restarted_make_one_grade_book(tmp_path):
    for name, content in {"ann": b"", "bob": solved_files()[HOME], "cy": b""}.items():
        write_files({HOME: content}, tmp_path / "in" / name)
    out = tmp_path / "graded"
    first, second = (start(tmp_path / "in", out, part) for part in (1, 2))  # the first one has two
    limit = time.monotonic() + 400
    while not (out / "hand_ins/ann/report.json").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    first.kill()
    first.communicate()
    second.communicate(timeout=500)

    output, _ = start(tmp_path / "in", out, 1).communicate(timeout=500)

    assert json.loads(output.splitlines()[-1])["class"] == 3
    rows = list(csv.DictReader((out / "gradebook.csv").read_text().splitlines()))
    assert [(row["submission"], row["score"]) for row in rows] == [("ann", "0"), ("bob", "2"), ("cy", "0")]
    assert "not graded yet" not in (out / "index.html").read_text()
