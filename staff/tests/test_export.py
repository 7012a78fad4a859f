"""staff.export: points go into the table that Canvas or Moodle exported, and nothing else of it changes."""

import csv
import io

import pytest

from common.errors import InputError
from staff import export
from staff.grade.roster import read_roster, write_grades
from staff.tests.rows import entry, row

ROSTER = "id,name,partners\nab_12,Ada Byron,cd34\ncd34,Carl Dai,\n1007,Eve,\n"
CANVAS = """Student,ID,SIS Login ID,Section,HW 1 (31337),HW 2 (4)
Points Possible,,,,4,10
"Byron, Ada",901,ab_12,A,,9
"Dai, Carl",902,CD34,A,1,
"Who, Eve",1007,eve,B,,
"""
MOODLE = """Identifier,Full name,Email address,Status,Grade,Maximum Grade,Feedback comments
Participant 1007,Eve,eve@u.edu,Submitted,,4.00,
Participant 77,Ada Byron,ab_12@u.edu,Submitted,,4.00,"well, done"
"""


@pytest.fixture
def graded(tmp_path):
    (tmp_path / "roster.csv").write_text(ROSTER)
    rows = [row(entry("2b.1", "passed", most=4), name="ab_12")]
    write_grades(tmp_path / "grades.csv", read_roster(tmp_path / "roster.csv"), rows)
    return tmp_path


def exported(capsys, graded, text, *words):
    (graded / "table.csv").write_text(text)
    export.main([words[0], str(graded), str(graded / "table.csv"), *words[1:]])
    output = capsys.readouterr()
    return list(csv.DictReader(io.StringIO(output.out))), output.err


def test_canvas_gets_points_of_both_partners_and_keeps_the_rest(capsys, graded):
    rows, said = exported(capsys, graded, CANVAS, "canvas", "--column", "HW 1 (31337)")

    before = list(csv.DictReader(io.StringIO(CANVAS)))
    assert [line["HW 1 (31337)"] for line in rows] == ["4", "4", "4", ""]
    assert [line | {"HW 1 (31337)": ""} for line in rows] == [line | {"HW 1 (31337)": ""} for line in before]
    assert "2 of 4 rows have points" in said


def test_moodle_gets_points_by_address_and_who_has_no_row_is_named(capsys, graded):
    rows, said = exported(capsys, graded, MOODLE, "moodle")

    assert [(line["Grade"], line["Feedback comments"]) for line in rows] == [("", ""), ("4", "well, done")]
    assert "no row for cd34" in said


def test_the_zero_of_a_hand_in_that_cannot_be_read_is_named(capsys, graded):
    rows = [row(entry("2b.1", "crashed", most=4), name="ab_12", unreadable=True)]
    write_grades(graded / "grades.csv", read_roster(graded / "roster.csv"), rows)

    filled, said = exported(capsys, graded, MOODLE, "moodle")

    assert filled[1]["Grade"] == "0" and "note: ab_12 has 0 points: it cannot be read" in said


def test_points_above_the_maximum_which_moodle_skips_become_the_maximum_and_canvas_gets_them(capsys, graded):
    rows = [row(entry("2b.1", "passed", most=4), entry("b.1", "passed", most=3), name="ab_12")]
    write_grades(graded / "grades.csv", read_roster(graded / "roster.csv"), rows)

    moodle, said = exported(capsys, graded, MOODLE, "moodle")
    canvas, quiet = exported(capsys, graded, CANVAS, "canvas", "--column", "HW 1 (31337)")

    assert moodle[1]["Grade"] == "4" and "ab_12 has 7 points; Moodle takes at most 4" in said
    assert [line["HW 1 (31337)"] for line in canvas] == ["4", "7", "7", ""] and "takes" not in quiet


@pytest.mark.parametrize("text, words, expected", [
    (CANVAS, ["canvas"], "name the assignment's column"),
    (CANVAS, ["canvas", "--column", "HW 3"], "expected one of 'Student', 'ID'"),
    (CANVAS, ["canvas", "--column", "HW 2 (4)"], "at most 10 points, the course has 4"),
    (CANVAS.replace("901", "cd34"), ["canvas", "--column", "HW 1 (31337)"], r"ids of several people \(ab_12, cd34\)"),
    ("", ["moodle"], "expected a heading"),
    ("Identifier,Grade\na,1,2\n", ["moodle"], "rows with as many cells"),
    (CANVAS.replace(", ", "§").replace(",", ";").replace("§", ", "), ["canvas", "--column", "X"], "and commas between"),
])  # fmt: skip
def test_what_does_not_fit_is_said_in_a_line(capsys, graded, text, words, expected):
    with pytest.raises(InputError, match=expected):
        exported(capsys, graded, text, *words)


def test_a_class_without_a_roster_or_with_another_one_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text(MOODLE)
    with pytest.raises(InputError, match="run staff"):
        export.main(["moodle", str(tmp_path), str(tmp_path / "x.csv")])

    (tmp_path / "roster.csv").write_text("id\nsomebody\n")
    rows = [row(entry("2b.1", "passed"), name="ab_12")]
    write_grades(tmp_path / "grades.csv", read_roster(tmp_path / "roster.csv"), rows)
    with pytest.raises(InputError, match="nobody in it has points"):
        export.main(["moodle", str(tmp_path), str(tmp_path / "x.csv")])
