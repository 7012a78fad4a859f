"""What people read: the student's page, the page of the class, the grade book. Nothing of a student's text can act in
them, and however long or strange it is, they are made."""

import csv
import re
from pathlib import Path

import pytest

from course.table import load_course
from grader.report import Report
from staff.grade import gradebook, pages, texts
from staff.grade.measurements import measured
from staff.grade.own_texts import read_report
from staff.tests.rows import entry, row

COURSE = load_course()
DIVIDE = "did you divide by world_size?"
MEAN = "on rank 0, parameter 2 (4,): expected [1 2], got [3 6] (off by 4 at most)"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
EXCEL = 32_767  # characters of a cell


def printed(ranks: int, *, alike: bool = False, text: str = "loss 0.7") -> dict:
    return {"tests/t.py::test_it_works": [
        {"rank": rank, "ended": "raised at x.py:3", "stdout": "" if alike else f"{rank}: {text}", "stderr": text}
        for rank in range(ranks)
    ]}  # fmt: skip


def text_of(page: str) -> str:
    """What is read: without tags, blanks as one."""
    return " ".join(re.sub(r"<[^>]+>", " ", page.split("</style>")[1]).split())


def student(*entries, **more) -> str:
    return text_of(pages.student_page(row(*entries, **more), COURSE))


def test_a_student_reads_points_failure_hint_and_how_to_see_it_again():
    page = student(
        entry("1.1", "passed"), entry("2a.3", "wrong", MEAN, cause=DIVIDE, seed=55), entry("b.1", "passed", most=4)
    )

    assert "2 of 4 points and 4 of 4 bonus points" in page
    assert "Task 2a: Data parallel with gather and scatter 0 of 2" in page
    assert f"{DIVIDE} {MEAN}" in page
    assert f"Hint: {COURSE.regions['2a.3'].hints[0]}" in page.replace("&#39;", "'")
    assert page.count("drawn with seed 55") == 1 and "use --seed 55 to repeat them" in page
    assert "Look here first: 2a.3" in page


def test_tests_that_fail_for_one_reason_are_shown_once_and_the_cause_comes_first():
    page = student(
        entry("2a.3", "wrong", "vague words", "test_vague"),
        entry("2a.3", "wrong", MEAN, "test_mean", cause=DIVIDE),
        entry("2a.3", "wrong", MEAN.replace("3", "2"), "test_mean_of_two", cause=DIVIDE),
    )

    assert page.count("did you divide by world_size?") == 1 and "The same: mean of two" in page
    assert page.index("did you divide") < page.index("vague words")
    assert page.count("Hint:") == 2  # where to look first, and the region's


def test_a_region_that_waits_says_for_which_and_what_was_seen_and_what_nobody_has_begun_takes_one_line():
    waiting = entry("p.3", "skipped", "split_size is the number of examples", first="p.1")
    untried = (entry("2b.1", "not attempted", "region 2b.1 is not written yet", f"test_{n}") for n in range(9))

    page = student(waiting, *untried)

    observation = "Observed so far, while p.1 does not pass: split_size is the number of examples"
    assert "waits for p.1" in page and observation in page
    assert "not attempted 9 tests" in page and "not written yet" not in page
    assert "Hint:" not in page and "Look here first" not in page


def test_what_each_rank_printed_is_shown_once_for_ranks_that_are_alike():
    failed = entry("2a.3", "crashed", "ranks 0-7 raised")

    differ, same = student(failed, output=printed(8)), student(failed, output=printed(8, alike=True))

    assert all(f"rank {rank} raised at x.py:3 {rank}: loss 0.7" in differ for rank in range(8))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 raised at x.py:3 loss 0.7" in same
    assert pages.as_shown("\r 0/2\r 1/2\n\n\x1b[A\r 2/2\nlost\x07\n") == " 1/2\n 2/2\nlost\\x07"  # progress bars


@pytest.mark.parametrize("make", ["student", "class"])
def test_nothing_a_student_wrote_can_act_and_nothing_comes_from_outside(make):
    hostile = row(entry("1.1", "wrong", HOSTILE), name=HOSTILE, notes=[HOSTILE], output=printed(2, text=HOSTILE))

    page = pages.student_page(hostile, COURSE) if make == "student" else pages.class_page([hostile], COURSE, HOSTILE)

    assert "<script" not in page and "<img" not in page and ">49<" not in page
    assert "{{ 7 * 7 }}" in page
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    assert "default-src 'none'" in page


# --- the class in figures ---------------------------------------------------------------------------------------------


def test_equal_mistakes_are_counted_together_whatever_their_numbers():
    def wrong(name, number, seed):
        test = entry("1.2", "wrong", f"expected 1, got {number}", cause=DIVIDE, seed=seed)
        return row(test, entry("1.3", "skipped", "x"), name=name)

    other = row(entry("1.2", "wrong", "else"), name="b & co")
    groups = gradebook.mistakes([wrong("a", 2.5, 77), other, wrong("c", -3e-7, 8)])
    page = pages.class_page([wrong("a", 2.5, 77), other, wrong("c", -3e-7, 8)], COURSE, "")

    assert [(mistake.names, mistake.message) for mistake in groups] == [
        (("a", "c"), f"{DIVIDE}\nexpected 1, got 2.5"), (("b & co",), "else")
    ]  # fmt: skip
    assert "2 of 3" in text_of(page) and 'href="hand_ins/b%20%26%20co/index.html"' in page


def test_of_many_mistakes_the_page_has_the_most_frequent():
    rare = row(*(entry("1.2", "wrong", name=f"test_{number}") for number in range(30)), name="a")
    frequent = [row(entry("1.2", "wrong", name="test_last"), name=name) for name in "bc"]

    groups = gradebook.mistakes([rare, *frequent])

    assert len(groups) == gradebook.MOST_MISTAKES and groups[0].names == ("b", "c")


def test_a_regions_share_tells_all_some_none_and_not_attempted():
    def two(first, second):
        return row(entry("1.1", first), entry("1.1", second, most=1))

    (share,) = gradebook.regions(
        [two("passed", "passed"), two("passed", "wrong"), two("wrong", "skipped"), two(*["not attempted"] * 2)], COURSE
    )

    assert (share.full, share.some, share.none, share.untried) == (1, 1, 1, 1)
    assert (share.max_points, share.mean) == (3, 1.25)


def test_a_region_whose_tests_here_give_no_points_has_no_row():
    assert (
        gradebook.regions([row(entry("1.1", "passed", most=0)), row(entry("1.1", "not attempted", most=0))], COURSE)
        == []
    )


@pytest.mark.parametrize("points, name", [(100, "90–100 %"), (87, "80–90 %"), (0, "0–10 %")])
def test_a_score_is_in_its_bin_and_full_marks_in_the_last(points, name):
    bins = gradebook.histogram([row(entry("1.1", "passed", most=points), entry("1.2", "wrong", most=100 - points))])

    assert [name for name, count in bins if count] == [name]


def test_what_to_look_at_by_hand_is_for_staff_and_never_on_the_students_page():
    flags = [{"file": "common/schedule.py", "line": 3, "what": "calls os._exit"}, {"file": "", "line": 0, "what": ""}]
    flagged = row(entry("1.1", "passed"), flags=flags)

    assert not re.search("os._exit|review", pages.student_page(flagged, COURSE))
    page = pages.class_page([flagged], COURSE, "")
    assert "common/schedule.py:3" in page and "Needs manual review" in page
    assert gradebook.look_at(flagged) == "common/schedule.py:3, while running"


def test_measured_times_are_read_from_records_and_reports_and_not_from_a_readme(tmp_path):
    (tmp_path / "report.md").write_text("A step takes 12.345 ± 0.678 s, without the network 8.5 ± 0.5 s.")
    (tmp_path / "README.md").write_text("1.111 ± 0.111")
    (tmp_path / "a.json").write_text('{"mean_time": 2.3456789, "time_left": 3.25, "x": 5.678912}')

    assert measured(tmp_path) == ["12.345 ± 0.678", "mean_time=2.345679"]


# --- texts of any length, with any character --------------------------------------------------------------------------


def reported(folder: Path, message: str) -> dict:
    """The report as the graders write it, read again; its message is also what is flagged and warned of."""
    report = Report(folder / "report.json")
    report.expect([entry("1.1", "wrong", message)])
    report.warn(message)
    return read_report(folder / "report.json")


@pytest.mark.parametrize("text", ["x" * 900_000, "expected " * 100_000, "a, got b\n" * 100_000])
def test_a_message_of_any_length_is_clipped_and_says_so(tmp_path, text):
    result = reported(tmp_path, text)

    assert len(result["tests"][0]["message"]) < 10_000 and "more characters" in result["tests"][0]["message"]
    assert len(result["notes"][0]) < 600 and "\n" not in result["notes"][0]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00", "\x1b]0;title\x07", "\u202e", "\U0010ffff", "a\nb"])
def test_every_character_gives_a_report_a_page_and_a_row(tmp_path, text):
    result = reported(tmp_path, text)
    strange = row(notes=result["notes"], flags=[texts.flag({"file": text, "line": 1, "what": text})])
    strange.report["tests"] = result["tests"]

    pages.student_page(strange, COURSE).encode()
    pages.class_page([strange], COURSE, "").encode()
    gradebook.write_csv(tmp_path / "gradebook.csv", [strange], COURSE)

    assert (tmp_path / "gradebook.csv").read_text().count("\n") == 2


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '{"tests": [], "outp'])
def test_a_report_that_was_cut_off_counts_as_none_and_is_noted(tmp_path, content):
    (tmp_path / "report.json").write_text(content)

    result = read_report(tmp_path / "report.json")

    assert (result["tests"], result["output"]) == ([], {}) and "cannot be read" in result["notes"][0]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_no_cell_becomes_a_formula_whatever_separates_and_none_is_too_long(tmp_path, separator):
    notes = ["\uff1d1", f"ignored: x{separator}=cmd|' /C calc'!A0", "=1+1", "n" * 900_000]
    flags = [{"file": "x" * 300, "line": number, "what": ""} for number in range(500)]
    gradebook.write_csv(tmp_path / "gradebook.csv", [row(name="=1+1", notes=notes, flags=flags)], COURSE)

    with open(tmp_path / "gradebook.csv", newline="") as file:
        cells = [cell for line in csv.reader(file, delimiter=separator) for cell in line]

    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\uff1d"))]
    assert max(map(len, cells)) <= EXCEL
    assert [len(texts.notes(["\u202e" * 900] * 400)), texts.notes(["x"] * 400)[-1]] == [20, "381 more notes"]
