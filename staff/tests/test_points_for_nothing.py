"""Hand-ins that hold no work earn nothing: the untouched handout, and a statement that does nothing in every region."""

from pathlib import Path

import pytest

from course.table import files_matching, load_course
from course.todo import find_blocks
from staff.grade.hand_ins import grader_files
from staff.grade.submissions import TREE, write_files
from staff.proofs.grading_pool import grade
from staff.tests.handouts import open_handout

COURSE = load_course()
NOTHING = {"pass": "pass", "return None": "return None", "ellipsis": "..."}


def make(tree: Path, body: str = "") -> None:
    """A handout with `body` in place of every placeholder; "" leaves them."""
    write_files(open_handout().files, tree)
    for file in files_matching(tree, TREE) if body else ():
        lines = (tree / file).read_text(encoding="utf-8").split("\n")
        for block in reversed(find_blocks("\n".join(lines), file)):
            lines[block.line : block.end_line - 1] = [block.indent + body]
        (tree / file).write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("body", NOTHING.values(), ids=NOTHING)
def test_a_statement_that_does_nothing_in_every_region_earns_no_point(tmp_path, body):
    make(tmp_path / "tree", body)

    lost = grade(tmp_path / "tree", grader_files(), 1).points_lost

    assert lost == {id: row.points for id, row in COURSE.regions.items()}


@pytest.mark.medium
def test_the_untouched_handout_earns_no_point_and_every_test_says_so(tmp_path):
    make(tmp_path / "tree")

    graded = grade(tmp_path / "tree", grader_files(), 1)

    assert set(graded.statuses.values()) == {"not attempted"}
    assert graded.points_lost == {id: row.points for id, row in COURSE.regions.items()}
