"""Tests of the pages: what a student reads, that nothing of a student's text can act, that a phone can show them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from course.table import load_course
from staff.grade import pages
from staff.grade.own_process import run_apart
from staff.tests.rows import a_row, a_test

COURSE = load_course()
SEED = " (inputs drawn with seed 55; use --seed 55 to repeat them)"
MEAN = (
    "every gradient is 3.000 times the mean on 3 workers: did you divide by world_size?\n"
    "expected the mean of 3 workers' gradients; on rank 0, parameter 2 (4,): expected [1 2], got [3 6]"
    " (off by 4 at most)"
)
GRID = "4 micro-batches on 2 partitions: clock 1 is empty: leave out cycles without pairs\nclock   0  1\npart 0  0  .\n"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def output(ranks: int, *, alike: bool = False, text: str = "loss 0.7") -> dict:
    ranks_output = [
        {"rank": rank, "ended": "raised at x.py:3", "stdout": "" if alike else f"{rank}: {text}", "stderr": text}
        for rank in range(ranks)
    ]
    return {"tests/t.py::test_it_works": ranks_output}


def text_of(page: str) -> str:
    """What is read: without tags, blanks as one."""
    return " ".join(re.sub(r"<[^>]+>", " ", page.split("</style>")[1]).split())


@pytest.mark.parametrize(
    "message, cause, where, expected, got, rest",
    [
        (MEAN, "every gradient is 3.000 times the mean on 3 workers: did you divide by world_size?",
         "expected the mean of 3 workers' gradients; on rank 0, parameter 2 (4,)", "[1 2]",
         "[3 6] (off by 4 at most)", ""),
        ("for MNLI expected a head with 3 outputs, got 2: was config given?", "was config given?", "for MNLI",
         "a head with 3 outputs", "2", ""),
        (GRID, GRID.split("\n")[0], "", "", "", "clock   0  1\npart 0  0  ."),
        ("", "", "", "", "", ""),
    ],
)  # fmt: skip
def test_a_message_is_taken_apart(message, cause, where, expected, got, rest):
    parts = pages.take_apart(message)

    assert (parts.cause, parts.where, parts.expected, parts.got, parts.rest) == (cause, where, expected, got, rest)


PIECES = ["expected ", ", got ", "expected a, got b: ", ": c?", " (inputs drawn with seed 1; ", "9", "\x1b[0;", "\n"]


@pytest.mark.parametrize("piece", PIECES)
def test_a_message_of_a_million_characters_of_any_kind_is_taken_apart_before_the_deadline(piece):
    run_apart(pages.take_apart, piece * (1_000_000 // len(piece)) + ", got 1", seconds=100)


def test_a_student_reads_points_failure_hint_and_how_to_see_it_again():
    page = text_of(pages.student_page(a_row(a_test("1.1", "passed"), a_test("2a.3", "wrong", MEAN + SEED)), COURSE))

    assert "2 of 4 points" in page
    assert "Task 2a: Data parallel with gather and scatter 0 of 2" in page
    assert "expected [1 2] got [3 6]" in page
    assert f"Hint: {COURSE.regions['2a.3'].hints[0]}" in page.replace("&#39;", "'")
    assert page.count("drawn with seed 55") == 1 and "use --seed 55 to repeat them" in page
    assert "Look here first: 2a.3" in page


def test_bonus_points_are_shown_apart_from_the_others():
    made = a_row(a_test("1.1", "passed"))
    made.report.update({"bonus": 4, "max_bonus": 15})

    assert "2 of 2 points and 4 of 15 bonus points" in text_of(pages.student_page(made, COURSE))
    assert "2 of 2 points and 4 of 15 bonus points" in text_of(pages.class_page([made], COURSE, ""))


def test_tests_that_fail_for_one_reason_are_shown_once_and_the_cause_comes_first():
    three_failures = a_row(
        a_test("2a.3", "wrong", "vague words", "test_vague"),
        a_test("2a.3", "wrong", MEAN, "test_mean"),
        a_test("2a.3", "wrong", MEAN.replace("3", "2"), "test_mean_of_two"),
    )

    page = text_of(pages.student_page(three_failures, COURSE))

    assert page.count("did you divide by world_size?") == 1 and "The same: mean of two" in page
    assert page.index("did you divide") < page.index("vague words")
    assert page.count("Hint:") == 2  # where to look first, and the region's


def test_a_region_that_waits_says_for_which_and_what_was_seen():
    message = "depends on region p.1, which does not pass yet. Observed: split_size is the number of examples"

    page = text_of(pages.student_page(a_row(a_test("p.3", "skipped", message)), COURSE))

    observation = "Observed so far, while p.1 does not pass: split_size is the number of examples"
    assert "waits for p.1" in page and observation in page
    assert "Hint:" not in page and "Look here first" not in page


def test_regions_that_nobody_has_begun_take_one_line_and_what_is_unreadable_is_said_once():
    untried = (a_test("2b.1", "not attempted", "region 2b.1 is not written yet", f"test_{n}") for n in range(9))
    unreadable = a_row(a_test("1.1", "crashed", "no zip"), notes=["cannot be read: no zip"], unreadable=True)

    page = text_of(pages.student_page(a_row(*untried), COURSE))

    assert "not attempted 9 tests" in page and "not written yet" not in page
    assert text_of(pages.student_page(unreadable, COURSE)).count("no zip") == 1
    assert "1 could not be read" in text_of(pages.class_page([unreadable], COURSE, ""))


def test_what_each_rank_printed_is_shown_once_for_ranks_that_are_alike():
    failed = a_test("2a.3", "crashed", "ranks 0-7 raised")

    differ = text_of(pages.student_page(a_row(failed, output=output(8)), COURSE))
    same = text_of(pages.student_page(a_row(failed, output=output(8, alike=True)), COURSE))

    assert all(f"rank {rank} raised at x.py:3 {rank}: loss 0.7" in differ for rank in range(8))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 raised at x.py:3 loss 0.7" in same


def test_of_a_progress_bar_the_last_state_is_shown():
    assert pages.as_shown("\r 0/2\r 1/2\n\n\x1b[A\r 2/2\nlost\x07\n") == " 1/2\n 2/2\nlost\\x07"


@pytest.mark.parametrize("make", ["student", "class"])
def test_nothing_a_student_wrote_can_act_and_nothing_comes_from_outside(make):
    hostile = a_row(a_test("1.1", "wrong", HOSTILE), name=HOSTILE, notes=[HOSTILE], output=output(2, text=HOSTILE))

    page = pages.student_page(hostile, COURSE) if make == "student" else pages.class_page([hostile], COURSE, HOSTILE)

    assert "<script" not in page and "<img" not in page and ">49<" not in page
    assert "{{ 7 * 7 }}" in page
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    assert "default-src 'none'" in page


def test_the_class_page_counts_mistakes_and_links_every_student():
    rows = [a_row(a_test("1.2", "wrong", MEAN), name=name) for name in ("ann", "bob & co")]
    rows.append(a_row(a_test("1.2", "passed"), name="cy"))

    page = pages.class_page(rows, COURSE, "")

    assert "2 of 3" in text_of(page) and "ann, bob &amp; co" in page
    assert 'href="hand_ins/bob%20%26%20co/index.html"' in page
    assert "Mean 0.7, median 0 of 2 points" in text_of(page)


def widths(page: str, folder: Path, width: int) -> dict:
    """How wide the page is in a window of `width`, told by a page around it: the page itself has no scripts."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        pytest.skip(f"no browser here: looked for {', '.join(BROWSERS)}")
    (folder / "page.html").write_text(page)
    (folder / "frame.html").write_text(
        f"<iframe id=f src=page.html style='width:{width}px;height:900px;border:0'></iframe><pre id=out></pre><script>"
        "onload=()=>{const d=f.contentDocument; out.textContent=JSON.stringify({page:d.documentElement.scrollWidth,"
        "window:d.documentElement.clientWidth, text:d.body.innerText.length})}</script>"
    )
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files --dump-dom"
    command = [browser, *flags.split(), f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'frame.html'}"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(re.search(r'<pre id="out">(.*?)</pre>', process.stdout)[1])  # type: ignore[index]


@pytest.mark.medium
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("make", ["student", "class"])
def test_no_page_is_wider_than_the_window(tmp_path, width, make):
    long = f"{'x' * 400} expected {list(range(200))}, got {'y' * 400}\n{'z' * 500}"
    tests = [a_test("2a.3", "wrong", long), a_test("3.1", "crashed", MEAN, "test_" + "very_long_" * 12)]
    long_row = a_row(*tests, name="n" * 80, notes=["m" * 300], output=output(8, text="w" * 300))

    page = pages.student_page(long_row, COURSE) if make == "student" else pages.class_page([long_row] * 3, COURSE, "")
    measured = widths(page.replace("<details>", "<details open>"), tmp_path, width)

    assert measured["window"] == width and measured["text"] > 500
    assert measured["page"] <= width
