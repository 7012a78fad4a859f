"""What a student reads after a grading: one message for each reason, the cause first, and what comes next."""

import pytest

from course.next_step import next_step
from course.table import load_course
from grader.messages import messages
from grader.report import Entry

COURSE = load_course()
MEAN = "every gradient is {0}.000 times the mean on {0} workers: did you divide by world_size?"


def entry(name, observed="", status="wrong", region="2b.1", cause="", kind="", seed=None, first=""):
    points, kind = (2 if status == "passed" else 0), kind or cause or name
    return Entry(
        f"tests/start/test_start.py::{name}", "2b", region, status, points, 2, cause, observed, kind, seed, first
    )


def test_the_cause_comes_first_and_tests_that_say_the_same_are_listed_by_name():
    lines = messages(
        [
            entry("test_bytes", "expected 8 bytes, got 16", seed=7),
            entry("test_mean", "expected 3, got 1", cause=MEAN.format(3), kind=MEAN, seed=7),
            entry("test_sizes", "expected 2, got 1", cause=MEAN.format(2), kind=MEAN, seed=7),
            entry("test_other", status="passed"),
        ],
        COURSE,
    )

    assert lines == [
        "2b.1 synchronise gradients with all_reduce: 2/8 points (task2b_allreduce/run_glue.py)",
        "  wrong: every gradient is 3.000 times the mean on 3 workers: did you divide by world_size?",
        "  expected 3, got 1",
        "    same cause: test_sizes",
        "  wrong: expected 8 bytes, got 16 [test_bytes]",
        "inputs were drawn with seed 7; use --seed 7 to repeat them",
    ]


CAUSE = "two tasks took the same micro-batch: bind the loop variables"
TUPLE = "split() and chunk() return a tuple: make a list of it"
FIRST_CAUSES = {
    "a crash that says what to change": (
        [entry("test_a", "expected 8, got 16"), entry("test_b", "rank 0 raised TypeError", "crashed", cause=TUPLE)],
        f"  crashed: {TUPLE}",
    ),
    "a cause before what was only seen": (
        [entry("test_a", "expected 8"), entry("test_b", "only [2] ran"), entry("test_c", cause=CAUSE)],
        f"  wrong: {CAUSE}",
    ),
    "what a region waits for and what was seen": (
        [entry("test_a", "split_size is the number of examples", "skipped", "p.3", first="p.1")],
        "  p.3 depends on p.1; observed so far: split_size is the number of examples",
    ),
}


@pytest.mark.parametrize("name", FIRST_CAUSES)
def test_what_helps_most_comes_first(name):
    entries, line = FIRST_CAUSES[name]

    assert messages(entries, COURSE)[1] == line


def test_only_the_first_message_of_a_region_is_long():
    long = "expected " + "0.1 " * 100
    lines = messages([entry("test_a", long + "a"), entry("test_b", "other words, " + long)], COURSE)

    assert len(lines[1]) > 300
    assert max(map(len, lines[2:])) < 250


@pytest.fixture
def tree(tmp_path):
    """Files of which 1.2, 1.3, 2b.2 and 2b.5 are open, and 1.1 and 2b.4 are written."""
    (tmp_path / "task1_single").mkdir()
    (tmp_path / "common").mkdir()
    todo = "# TODO(cos598d) {0}: do it\n{1}\n# END TODO {0}\n"
    placeholder = 'raise NotImplementedError("TODO {0}: do it")'
    bodies = {"1.1": "config = 1", "1.2": placeholder.format("1.2"), "1.3": placeholder.format("1.3")}
    (tmp_path / "task1_single/run_glue.py").write_text("".join(todo.format(*pair) for pair in bodies.items()))
    bodies = {"2b.2": placeholder.format("2b.2"), "2b.4": "sizes = 1", "2b.5": placeholder.format("2b.5")}
    (tmp_path / "common/data_partition.py").write_text("".join(todo.format(*pair) for pair in bodies.items()))
    return tmp_path


@pytest.mark.parametrize(("asked", "failed", "begin"), [
    (set(), [], "next: 1.2 backward, task1_single/run_glue.py:4 "),  # the first whose needs are written
    ({"2b.2"}, [], "next: 2b.2 "),
    ({"1.3"}, [], "next: 1.2 "),  # 1.3 builds on it
    ({"2b.5"}, [], "next: 1.2 "),  # builds on 2b.4, which is written but builds on the open 2b.2
    (set(), ["2b.1"], "next: 2b.1; `python -m pytest --hint 2b.1`"),  # what has just failed comes before what is open
])  # fmt: skip
def test_the_next_step_can_be_begun_and_is_what_was_asked_for_or_has_failed(tree, asked, failed, begin):
    assert next_step(COURSE, tree, asked=asked, failed=failed).startswith(begin)


@pytest.mark.parametrize(("printed", "all_ranks", "shown", "last"), [
    ("line\n" * 1000, False, 8, "    ... 992 more lines; use --prints all to see more"),
    ("x" * 1000 + "\nline" * 1000, True, 199, "    ... 801 more lines"),
])  # fmt: skip
def test_of_many_lines_the_first_are_shown_and_the_others_counted(printed, all_ranks, shown, last):
    test = entry("test_mean", "wrong")

    lines = messages([test], COURSE, {test.id: {0: printed}}, all_ranks)

    assert sum(line == "    line" for line in lines) == shown
    assert lines[-1] == last
    assert not all_ranks or any(line.endswith("xxx ...") for line in lines)  # a long line says that it is cut
