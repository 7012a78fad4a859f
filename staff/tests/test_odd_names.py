"""Names and texts that a hand-in chooses: they are never taken for another hand-in's, nor for a line of ours."""

import csv
from pathlib import Path

import pytest

from course.table import load_course
from staff.grade import texts
from staff.grade.gradebook import Row, write_csv
from staff.grade.submissions import choose, name_all

COURSE = load_course()


def names(*paths: str) -> list[str]:
    return [submission.name for submission in name_all([Path(path) for path in paths])]


def test_a_name_that_another_hand_in_would_get_is_not_given_twice():
    first = names("/a/x/hw.zip", "/b/x/hw.zip")
    chosen = [f"/a/{name}" for name in (*first, f"{first[0]}-{first[0].rpartition('-')[2]}")]

    assert len(set(names("/a/x/hw.zip", "/b/x/hw.zip", *chosen))) == 2 + len(chosen)


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        ("run_glue (1).py", "Rename it to run_glue.py"),
        ("Run_Glue.py", "Rename it to run_glue.py"),
        ("run_glue.py.txt", "Rename it to run_glue.py"),
        ("solution.ipynb", "Export it as run_glue.py"),
        ("notes.py", "count as unsolved"),
    ],
)
def test_a_lesson_s_file_that_is_missing_is_named_with_what_is_there_instead(tmp_path, found, advice):
    (tmp_path / "task1").mkdir()
    (tmp_path / "task1" / found).write_text("")

    _, (note,) = choose(tmp_path, COURSE)

    assert note.startswith("task1_single/run_glue.py is missing, so its regions (1.1, 1.2, 1.3, 1.4) count as unsolved")
    assert advice in note
    assert (repr(found) in note) == (found != "notes.py")


def test_a_task_that_was_not_handed_in_is_no_missing_file(tmp_path):
    (tmp_path / "task1").mkdir()
    (tmp_path / "task1/run_glue.py").write_text("")

    assert choose(tmp_path, COURSE)[1] == []


def test_a_line_end_in_a_note_adds_no_line():
    (note,) = texts.notes(["1 file ignored: a\n100 of 100 points\n.py"])

    assert "\n" not in note
    assert "100 of 100" in note


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_no_cell_becomes_a_formula_whatever_separates(tmp_path, separator):
    report = {"submission": "a", "score": 0, "max_score": 100, "tests": []}
    run = {"notes": [f"ignored: x{separator}=cmd|' /C calc'!A0", "=1+1"], "flags": []}
    write_csv(tmp_path / "gradebook.csv", [Row(report, run)], COURSE)

    with open(tmp_path / "gradebook.csv", newline="") as file:
        cells = [cell for line in csv.reader(file, delimiter=separator) for cell in line]

    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
