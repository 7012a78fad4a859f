"""What graders report about a hand-in: however long or strange its texts, the report, the page and the row are made."""

import json
from pathlib import Path

import pytest

from course.table import load_course
from staff.grade import gradebook, own_texts, pages
from staff.grade.gradebook import Row
from staff.grade.own_texts import read_report, reason
from staff.tests.rows import a_row, a_test

COURSE = load_course()
ID = "tests/t.py::test_it_works"


def reported(folder: Path, message: str = "", ended: str = "returned", stdout: str = "", **more) -> dict:
    """The report as the graders write it, read again."""
    test = a_test("1.1", "wrong", message)
    rank = {"rank": 0, "ended": ended, "stdout": stdout, "stderr": ""}
    (folder / "report.json").write_text(json.dumps({"tests": [test], "output": {ID: [rank]}, **more}))
    return read_report(folder / "report.json")


def as_row(result: dict) -> Row:
    return a_row(*result["tests"], output=result["output"], flags=result["flags"])


@pytest.mark.parametrize("text", ["x" * 900_000, "expected " * 100_000, "a, got b\n" * 100_000])
def test_a_message_of_any_length_is_clipped_and_says_so(tmp_path, text):
    (test,) = reported(tmp_path, text)["tests"]

    assert len(test["message"]) < 10_000 and "more characters" in test["message"]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00", "\x1b]0;title\x07", "\u202e", "\U0010ffff"])
def test_every_character_gives_a_report_a_page_and_a_row(tmp_path, text):
    result = reported(tmp_path, text, text, text, flags=[{"file": text, "line": 1, "what": text}])
    row = as_row(result)

    pages.student_page(row, COURSE).encode()
    pages.class_page([row], COURSE, "").encode()
    gradebook.write_csv(tmp_path / "gradebook.csv", [row], COURSE)

    assert (tmp_path / "gradebook.csv").read_text().count("\n") == 2


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '{"tests": [], "outp'])
def test_a_report_that_was_cut_off_counts_as_none_and_is_noted(tmp_path, content):
    (tmp_path / "report.json").write_text(content)

    result = read_report(tmp_path / "report.json")

    assert (result["tests"], result["output"]) == ([], {}) and "cannot be read" in result["notes"][0]


def test_a_report_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(own_texts, "LARGEST_REPORT", 100)

    assert "was not read" in reported(tmp_path)["notes"][0]


def test_the_reason_for_an_error_of_the_system_names_no_folder_of_ours():
    assert reason(OSError(36, "File name too long", "/tmp/cos598d-grade-x/unpacked/y")) == "OSError: File name too long"


def test_what_to_look_at_by_hand_is_for_staff_and_never_on_the_students_page(tmp_path):
    result = reported(tmp_path, flags=[{"file": "common/schedule.py", "line": 3, "what": "calls os._exit"}])
    row = as_row(result)

    assert "os._exit" not in pages.student_page(row, COURSE) and "review" not in pages.student_page(row, COURSE)
    assert "common/schedule.py:3" in pages.class_page([row], COURSE, "")
    assert "Needs manual review" in pages.class_page([row], COURSE, "")
    assert gradebook.look_at(row) == "common/schedule.py:3"


def test_a_flag_that_belongs_to_no_line_is_shown_without_one():
    assert gradebook.place_of({"file": "a.py", "line": 3, "what": ""}) == "a.py:3"
    assert gradebook.place_of({"file": "a.py", "line": 0, "what": ""}) == "a.py"
    assert gradebook.place_of({"file": "", "line": 0, "what": ""}) == "while running"
