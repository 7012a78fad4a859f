"""Ranks start with the modules of common/ that every script imports, as long as the student has not changed common/."""

import shutil

import pytest

from common.paths import ROOT
from course.table import load_course
from grader import ranks
from grader.given_files import GivenCommon

pytestmark = pytest.mark.medium

COURSE = load_course()
SCRIPT = """
import sys
there = "common.record" in sys.modules
import common.paths, common.record
print(there, common.paths.ROOT, getattr(common.record, "MINE", "ours"), type(common.record.__loader__).__module__)
"""


def make_tree(tree):
    shutil.copytree(ROOT / "common", tree / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "run_glue.py").write_text(SCRIPT)
    return tree


def change(tree, addition):
    with (tree / "common/record.py").open("a") as file:
        file.write(f"\n{addition}\n")


def printed(tree, given):
    result = ranks.run("grader.inside.context:load", 1, {"file": "run_glue.py"}, tree=tree, given=given)
    assert result.outcome == "returned", result.explain()
    return result.ranks[0].stdout.split()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The first tree of a zygote, whose modules it keeps."""
    ranks.stop()
    tree = make_tree(tmp_path_factory.mktemp("first") / "tree")
    printed(tree, GivenCommon(tree, COURSE).now())
    yield tree
    ranks.stop()


def test_a_second_tree_imports_its_own(first, tmp_path):
    second = make_tree(tmp_path / "second")

    assert printed(second, GivenCommon(second, COURSE).now())[:3] == ["False", str(second), "ours"]


def test_a_rank_starts_with_the_modules_of_an_unchanged_common_and_a_change_between_two_runs_counts(first):
    common, record = GivenCommon(first, COURSE), first / "common/record.py"
    before = record.read_text()
    assert printed(first, common.now())[:3] == ["True", str(first), "ours"]

    change(first, "MINE = 'mine'")
    changed = printed(first, common.now())
    record.write_text(before)

    assert changed[:3] == ["False", str(first), "mine"]
    assert printed(first, common.now())[:3] == ["True", str(first), "ours"]


def test_no_line_of_the_tree_runs_in_the_process_that_forks_ranks(tmp_path):
    ranks.stop()
    tree = make_tree(tmp_path / "tree")
    given = GivenCommon(tree, COURSE).now()

    change(tree, "MINE = 'mine'")  # after the look: the modules are ours all the same

    assert printed(tree, given)[:3] == ["True", str(tree), "ours"]
    ranks.stop()


def test_a_solved_region_in_common_is_no_change_but_a_missing_file_is(tmp_path):
    tree = make_tree(tmp_path / "tree")
    (tree / "common/data_partition.py").write_text("solved = True\n")
    assert GivenCommon(tree, COURSE).now() is not None

    (tree / "common/optim.py").unlink()
    assert GivenCommon(tree, COURSE).now() is None
