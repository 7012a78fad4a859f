"""Ranks start with the modules of common/ that every script imports, as long as the student has not changed common/."""

import shutil

import pytest

from common.paths import ROOT
from course.table import load_course
from grader import ranks
from grader.given_files import GivenCommon

COURSE = load_course()
SCRIPT = """
import sys
there = "common.record" in sys.modules
import common.paths, common.record
print(there, common.paths.ROOT, getattr(common.record, "MINE", "ours"))
"""


@pytest.fixture
def zygote():
    ranks.stop()
    yield
    ranks.stop()


@pytest.fixture
def make_tree(tmp_path):
    def make(name, addition=""):
        tree = tmp_path / name
        shutil.copytree(ROOT / "common", tree / "common", ignore=shutil.ignore_patterns("__pycache__"))
        (tree / "run_glue.py").write_text(SCRIPT)
        if addition:
            change(tree, addition)
        return tree

    return make


def change(tree, addition):
    with (tree / "common/record.py").open("a") as file:
        file.write(f"\n{addition}\n")


def printed(tree, given):
    result = ranks.run("grader.inside.context:load", 1, {"file": "run_glue.py"}, tree=tree, given=given)
    assert result.outcome == "returned", result.explain()
    return result.ranks[0].stdout.split()


def test_a_rank_starts_with_the_modules_of_an_unchanged_common_and_they_lie_in_the_tree(zygote, make_tree):
    tree = make_tree("tree")
    common = GivenCommon(tree, COURSE)

    assert printed(tree, common.now()) == ["True", str(tree), "ours"]
    assert printed(tree, common.now()) == ["True", str(tree), "ours"]


def test_a_rank_imports_a_changed_common_itself(zygote, make_tree):
    tree = make_tree("tree", "MINE = 'mine'")

    assert printed(tree, GivenCommon(tree, COURSE).now()) == ["False", str(tree), "mine"]


def test_a_change_between_two_runs_counts_in_the_second(zygote, make_tree):
    tree = make_tree("tree")
    common = GivenCommon(tree, COURSE)
    printed(tree, common.now())

    change(tree, "MINE = 'mine'")

    assert printed(tree, common.now()) == ["False", str(tree), "mine"]


def test_a_second_tree_imports_its_own(zygote, make_tree):
    first, second = make_tree("first"), make_tree("second")
    printed(first, GivenCommon(first, COURSE).now())

    assert printed(second, GivenCommon(second, COURSE).now()) == ["False", str(second), "ours"]


def test_no_line_of_the_tree_runs_in_the_process_that_forks_ranks(zygote, make_tree):
    tree = make_tree("tree")
    given = GivenCommon(tree, COURSE).now()

    change(tree, "MINE = 'mine'")  # after the look: the modules are ours all the same

    assert printed(tree, given) == ["True", str(tree), "ours"]


def test_a_tree_without_a_file_of_common_is_not_as_given(make_tree):
    tree = make_tree("tree")
    (tree / "common/optim.py").unlink()

    assert GivenCommon(tree, COURSE).now() is None


def test_a_solved_region_in_common_is_no_change(make_tree):
    tree = make_tree("tree")
    (tree / "common/data_partition.py").write_text("solved = True\n")

    assert GivenCommon(tree, COURSE).now() is not None
