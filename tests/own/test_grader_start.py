"""What the process that forks ranks has loaded before it forks: what makes ranks start at once, no student's line."""

import shutil

import pytest

from common.paths import ROOT
from course.table import load_course
from grader import imports, ranks
from grader.inside import preload
from grader.session import Session
from grader.wire.request import Request

pytestmark = pytest.mark.medium

COURSE = load_course()
SCRIPT = """
import sys
there = "common.record" in sys.modules
import common.paths, common.record
print(there, common.paths.ROOT, getattr(common.record, "MINE", "ours"))
"""


@pytest.fixture(scope="module")
def new_zygote(tmp_path_factory):
    """The first runs of a new zygote: of torch alone, of a script, and of torch alone once more."""
    ranks.stop()
    tree = tmp_path_factory.mktemp("tree")
    (tree / "common").mkdir()
    (tree / "common/data_partition.py").write_text("import sys\nprint('transformers' in sys.modules)\n")
    (tree / "run_glue.py").write_text((tree / "common/data_partition.py").read_text())
    file = "common/data_partition.py"
    partition = Request([None], file, libraries=imports.libraries(ROOT, file, COURSE))
    script = Request([None], "run_glue.py", libraries=["scripts"])
    requests = (partition, script, partition)
    return [ranks.run(request, tree=tree).ranks[0].stdout.strip() for request in requests]


def test_a_run_of_torch_alone_does_not_wait_for_transformers_and_a_later_one_has_it(new_zygote):
    assert new_zygote == ["False", "True", "True"]


def test_loading_a_file_needs_groups_that_exist():
    loading = [imports.libraries(ROOT, row.file, COURSE) for row in COURSE.regions.values()]

    assert {group for row in loading for group in row} <= set(preload.GROUPS)


# --- the modules of common/ that every script imports, as long as the student has not changed common/ -----------------


def make_tree(tree):
    shutil.copytree(ROOT / "common", tree / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "run_glue.py").write_text(SCRIPT)
    return tree


def printed(tree):
    """What a rank of a new grading prints of its modules."""
    result = Session(tree, COURSE, 1).result_of(Request([None], "run_glue.py", libraries=["scripts"]))
    assert result.outcome == "returned", result.explain()
    return result.ranks[0].stdout.split()


def test_ranks_start_with_an_unchanged_common_of_the_first_tree_and_import_any_other(new_zygote, tmp_path):
    first, second = make_tree(tmp_path / "first"), make_tree(tmp_path / "second")
    (first / "common/data_partition.py").write_text("solved = True\n")  # a region: no change

    assert printed(first) == ["True", str(first), "ours"]
    assert printed(second) == ["False", str(second), "ours"]

    with (first / "common/record.py").open("a") as file:
        file.write("MINE = 'mine'\n")
    assert printed(first) == ["False", str(first), "mine"]
