"""A class as Canvas, Moodle, Gradescope and GitHub Classroom give it out: read as it is, each hand-in its owners'."""

import csv
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from common.paths import ROOT
from course.zip_files import write_zip
from staff.grade.roster import owners, read_roster
from staff.grade.submissions import write_files
from staff.proofs.bank import solved_files

HOME = "common/data_partition.py"
QUICK = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
SOLVED = {HOME: solved_files()[HOME]}
METADATA = """submission_31:
  :submitters:
  - :name: Gus Scope
    :sid: '5001'
    :email: gus@x.edu
  - :name: Hal Scope
    :sid: '5002'
    :email: hal@x.edu
  :created_at: 2026-02-15 01:00:00.000000000 -05:00
"""
ROSTER = """id,name,partners,due,extension,submitted
4711,Ada Byron,,2026-02-13T23:59:00-05:00,,2026-02-14T09:30:00-05:00
x-9,Moo Dle,,2026-02-13T23:59:00-05:00,,
5001,Gus,,2026-02-13T23:59:00-05:00,,
5002,Hal,,2026-02-13T23:59:00-05:00,2026-02-16T23:59:00-05:00,
git-hub,Gitta,,,,
tara,Tara,pia,,,
pia,Pia,,,,
flo,Flo Ahl,,,,
"""


def download(folder: Path) -> list[Path]:
    """What somebody sees after unpacking the downloads."""
    write_zip({f"handout/{name}": text for name, text in SOLVED.items()}, folder / "byronada_LATE_4711_88217_hw-2.zip")
    (folder / "byronada_LATE_4711_88218_report.pdf").write_bytes(b"%PDF")
    write_zip(SOLVED, folder / "Flo Ahl_77_assignsubmission_file_hw.zip")
    (folder / "Flo Ahl_77_assignsubmission_file_report.pdf").write_bytes(b"%PDF")
    moodle = folder / "Moo Dle_1234_assignsubmission_file_"
    write_files({"report.pdf": b"%PDF"}, moodle)
    write_zip(SOLVED, moodle / "hw.zip")
    write_files(SOLVED, folder / "submission_31")
    (folder / "submission_metadata.yml").write_text(METADATA)
    write_files(SOLVED | {".git/config": b"[core]", "handout.json": b'{"version": "00000000"}'}, folder / "hw1-git-hub")
    with tarfile.open(folder / "tara.tar.gz", "w:gz") as archive:
        archive.add(folder / "hw1-git-hub/common", "mine/common")
    return sorted(folder.iterdir())


@pytest.mark.medium
def test_downloads_are_graded_as_they_are_and_each_hand_in_is_that_of_its_people_with_its_time(tmp_path):
    (tmp_path / "class").mkdir()
    (tmp_path / "roster.csv").write_text(ROSTER)
    paths = download(tmp_path / "class")

    words = [sys.executable, "-m", "staff.grade", *map(str, paths), "--out", str(tmp_path / "out"), "--tests", QUICK]
    done = subprocess.run([*words, "--roster", str(tmp_path / "roster.csv")], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["submissions"], figures["unreadable"]) == (6, 0)
    assert "without a hand-in: none; hand-ins of nobody in it: none" in done.stdout
    people = list(csv.DictReader((tmp_path / "out/grades.csv").read_text(encoding="utf-8").splitlines()))
    assert {person["score"] for person in people} == {people[0]["max_score"]}
    assert [person["late"] for person in people] == ["0 d 10 h", "", "1 d 2 h", *[""] * 5]
    assert "Canvas says late" in people[0]["notes"] and len(people) == 8
    gradebook = (tmp_path / "out/gradebook.csv").read_text(encoding="utf-8")
    assert gradebook.count("made with handout 00000000") == 1, "an older handout is said"
    assert gradebook.count("report.pdf") == 3, "what lies beside an archive is said to be left out"


@pytest.mark.parametrize(
    "hand_in, ids",
    [
        ("byronada_4000_88217_hw", {"ada@x.edu"}),
        ("byronada_LATE_4000_88217_hw", {"ada@x.edu"}),
        ("Ada_Byron_1234_assignsubmission_file_", {"ada@x.edu"}),
        ("submission_31_9_ada@x.edu", {"ada@x.edu"}),
        ("li_88_99_hw", set()),  # two of that name
        ("Lars_Slate_12_assignsubmission_file_", {"x3"}),  # his name ends like Canvas' mark
        ("slatelars_LATE_12_13_hw", {"x3"}),
        ("LATE_12_13_hw", set()),
        ("Ada_Byronova_1_assignsubmission_file_", set()),
        ("山田太郎_1_2_hw", {"007"}),
    ],
)
def test_a_hand_in_without_an_id_belongs_to_the_one_of_its_name(tmp_path, hand_in, ids):
    people = 'ada@x.edu,"Byron, Ada"', "x1,Li", "x2,Li", "x3,Lars Slate", "x4,", "007,山田 太郎"
    (tmp_path / "r.csv").write_text("\n".join(("id,name", *people)))

    assert owners(hand_in, read_roster(tmp_path / "r.csv")) == ids
