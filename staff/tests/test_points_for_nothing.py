"""Hand-ins that hold no work earn nothing: the untouched handout, and a statement that does nothing in every region."""

import json
from pathlib import Path

import pytest

from course.table import files_matching, load_course
from course.todo import find_blocks
from staff.grade.submissions import TREE, write_files
from staff.tests.handouts import open_handout
from tests.own.started_processes import run

COURSE = load_course()
GRADERS = sorted({test for task in COURSE.tasks.values() for test in (*task.tests, *task.whole)})
NOTHING = {"pass": "pass", "return None": "return None", "ellipsis": "..."}


def make(tree: Path, body: str = "") -> None:
    """A handout with `body` in place of every placeholder; "" leaves them."""
    write_files(open_handout().files, tree)
    for file in files_matching(tree, TREE) if body else ():
        lines = (tree / file).read_text(encoding="utf-8").split("\n")
        for block in reversed(find_blocks("\n".join(lines), file)):
            lines[block.line : block.end_line - 1] = [block.indent + body]
        (tree / file).write_text("\n".join(lines), encoding="utf-8")


def graded(tree: Path, folder: Path) -> list[dict]:
    report = folder / "report.json"
    run("-m", "pytest", "-q", f"--tree={tree}", "--report", report, *GRADERS, timeout=900)
    return json.loads(report.read_text())["tests"]


@pytest.mark.slow
@pytest.mark.parametrize("body", NOTHING.values(), ids=NOTHING)
def test_a_statement_that_does_nothing_in_every_region_earns_no_point(tmp_path, body):
    make(tmp_path / "tree", body)

    tests = graded(tmp_path / "tree", tmp_path)

    assert [test["id"] for test in tests if test["points"]] == []
    assert sum(test["max_points"] for test in tests) == sum(row.points for row in COURSE.regions.values())  # bonus, too


@pytest.mark.medium
def test_the_untouched_handout_earns_no_point_and_every_test_says_so(tmp_path):
    make(tmp_path / "tree")

    tests = graded(tmp_path / "tree", tmp_path)

    assert {(test["status"], test["points"]) for test in tests} == {("not attempted", 0)}
