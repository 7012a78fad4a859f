"""A class graded in parts: every submission in one part, one grade book, and any part can be killed and restarted."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from staff.grade import result_store
from staff.grade.class_files import write_class
from staff.grade.submissions import clean_files, name_all, write_files
from staff.grade.whole_class import share
from staff.tests.rows import a_row

HOME = "common/data_partition.py"
QUICK = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
COURSE = load_course()


@pytest.mark.parametrize("parts", [1, 3, 16])
def test_every_submission_is_in_exactly_one_part_whatever_the_order(parts):
    named = name_all([Path(f"/x/student{number}.zip") for number in range(10)])

    of_parts = [share(named[::-1] if number % 2 else named, f"{number}/{parts}") for number in range(1, parts + 1)]

    assert sorted(s.name for part in of_parts for s in part) == sorted(s.name for s in named)


@pytest.mark.parametrize("part", ["0/4", "5/4", "3", "a/b", "1/0", "-1/4"])
def test_a_part_that_is_none_is_said(part):
    with pytest.raises(InputError, match="expected NUMBER/PARTS"):
        share([], part)


def kept_row(out: Path, name: str) -> None:
    row = a_row(name=name, peak_pss_mb=1.0, wall_s=1.0, digest="")
    result_store.keep(out, row.report, row.run, "page")


def test_the_overview_names_what_is_not_graded_yet_and_damaged_results_count_as_that(tmp_path):
    for name in ("ann", "bob"):
        kept_row(tmp_path, name)
    (result_store.folder_of(tmp_path, "bob") / "run.json").write_text("{")

    figures = write_class(tmp_path, ["ann", "bob", "cy"], COURSE, "")

    assert [row["name"] for row in figures] == ["ann"]
    assert "2 not graded yet: bob, cy" in (tmp_path / "index.html").read_text()


def start(hand_ins: Path, out: Path, part: int, parts: int, python: str = sys.executable) -> subprocess.Popen:
    """One task of the array job, as SLURM starts it."""
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_ARRAY_TASK_ID": str(part), "SLURM_ARRAY_TASK_COUNT": str(parts)}
    environment = os.environ | slurm | {"OUT": str(out), "PYTHON": python, "SLURM_CPUS_PER_TASK": "1"}
    command = ["bash", str(ROOT / "staff/slurm/grade_class.sbatch"), f"{hand_ins}/*", "--tests", QUICK, "--seed", "5"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def figures_of(process: subprocess.Popen) -> dict:
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_a_task_of_the_array_job_grades_its_part_of_all_hand_ins(tmp_path):
    for name in ("ann", "bob"):
        (tmp_path / "in" / name).mkdir(parents=True)

    words, _ = start(tmp_path / "in", tmp_path / "out", 2, 3, python="echo").communicate()

    hand_ins = f"{tmp_path}/in/ann {tmp_path}/in/bob"
    options = f"--out {tmp_path}/out --part 2/3 --jobs 1 --tests {QUICK} --seed 5"
    assert words == f"-m staff.grade {hand_ins} {options}\n"


@pytest.mark.proof
@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_parts_at_once_with_one_killed_and_restarted_make_one_grade_book(tmp_path):
    contents = {"ann": clean_files()[HOME], "bob": (ROOT / HOME).read_bytes(), "cy": clean_files()[HOME]}
    for name, content in contents.items():
        write_files({HOME: content}, tmp_path / "in" / name)
    out = tmp_path / "graded"
    first, second = (start(tmp_path / "in", out, part, 2) for part in (1, 2))  # the first one has two
    report, limit = result_store.folder_of(out, "ann") / "report.json", time.monotonic() + 400
    while not report.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    first.kill()
    first.communicate()
    other = figures_of(second)

    again = figures_of(start(tmp_path / "in", out, 1, 2))

    assert other["graded"] == 1
    assert (again["submissions"], again["kept"] >= 1, again["class"]) == (2, True, 3)
    rows = list(csv.DictReader((out / "gradebook.csv").read_text().splitlines()))
    assert [(row["submission"], row["score"]) for row in rows] == [("ann", "0"), ("bob", "2"), ("cy", "0")]
    assert "not graded yet" not in (out / "index.html").read_text()
