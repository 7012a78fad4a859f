"""How little a graded run waits for: which test files pytest opens, and what the zygote has loaded before it forks."""

import re
import shutil

import pytest
from grader.selection import files_to_open

from common.paths import ROOT
from course.table import load_course
from grader import imports, ranks
from grader.given_files import given_common
from grader.inside import preload
from tests.own.started_processes import run

pytestmark = pytest.mark.medium

COURSE = load_course()


def test_a_marker_opens_the_test_files_of_its_tasks_only():
    wanted = {file for task in ("2a", "p") for file in (*COURSE.tasks[task].tests, *COURSE.tasks[task].whole)}

    assert files_to_open(COURSE, None, "task2a or a4_2_1") == wanted


@pytest.mark.parametrize("markers", ["not slow", "task2a and not slow", "medium", "task2a or medium", "not task2a"])
def test_where_the_table_cannot_tell_every_file_is_opened(markers):
    assert files_to_open(COURSE, None, markers) is None


def test_a_region_opens_the_test_files_of_its_row_only_and_selects_its_tests():
    code = "import sys, pytest; pytest.main(sys.argv[1:]); print(*sorted(m for m in sys.modules if 'test_' in m))"
    *named, last = run("-c", code, "-q", "--collect-only", "--region", "1.2").stdout.splitlines()

    opened = {name.rpartition(".")[2] for name in last.split() if name.startswith("tests.")}
    assert "test_loop" in opened and opened.isdisjoint({"test_pipe", "test_partitions", "test_start", "test_ring"})
    assert [line.rpartition("::")[2] for line in named if "::" in line] == [
        "test_backward_gives_the_gradient_of_the_batch", "test_every_batch_has_a_gradient_of_its_own",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def new_zygote(tmp_path_factory):
    """The first runs of a new zygote: of torch alone, of a script, and of torch alone once more."""
    ranks.stop()
    tree = tmp_path_factory.mktemp("tree")
    (tree / "common").mkdir()
    (tree / "common/data_partition.py").write_text(
        "import sys\nslow = {'transformers', 'transformers.modeling_utils'} & set(sys.modules)\n"
        "if slow:\n    raise RuntimeError(f'loaded: {sorted(slow)}')\n"
    )
    (tree / "run_glue.py").write_text((tree / "common/data_partition.py").read_text())
    partition = {
        "file": "common/data_partition.py",
        "preload": imports.libraries(ROOT, "common/data_partition.py", COURSE),
    }
    jobs = (partition, {"file": "run_glue.py", "preload": ["scripts"]}, partition)
    return [ranks.run(1, job, tree=tree) for job in jobs]


def test_a_run_of_torch_alone_does_not_wait_for_transformers_and_a_later_one_has_it(new_zygote):
    alone, script, again = new_zygote

    assert alone.outcome == "returned"
    assert "loaded: ['transformers'" in script.explain()
    assert "loaded: ['transformers'" in again.explain()


def test_loading_a_file_needs_groups_that_exist():
    loading = [imports.libraries(ROOT, row.file, COURSE) for row in COURSE.regions.values()]

    assert {group for row in loading for group in row} <= set(preload.GROUPS)


@pytest.mark.parametrize("task", list(COURSE.tasks))
def test_the_marker_of_a_task_finds_all_points_of_the_task(task):
    """A graded test in a file that the table does not name would be missed by `pytest -m`."""
    wanted = files_to_open(COURSE, None, COURSE.tasks[task].marker)
    regions = [id for id, row in COURSE.regions.items() if row.task == task]

    graded: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "own" not in path.parts:
            marked = set(re.findall(r'graded\(\s*"([^"]+)"', path.read_text()))
            graded[path.relative_to(ROOT).as_posix()] = marked.intersection(regions)
    assert set().union(*graded.values()) == set(regions)
    assert {file for file, ids in graded.items() if ids} <= set(wanted)


@pytest.mark.proof
@pytest.mark.parametrize("region", COURSE.regions)
def test_every_region_can_be_graded_alone(region):
    """In a fresh process, where nothing is loaded for another region."""
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--region", region, timeout=300)

    assert done.returncode == 0, done.stdout[-2000:]


# --- the modules of common/ that every script imports, as long as the student has not changed common/ -----------------

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
    script = {"file": "run_glue.py", "preload": ["scripts"]}
    result = ranks.run(1, script, tree=tree, given=given)
    assert result.outcome == "returned", result.explain()
    return result.ranks[0].stdout.split()


@pytest.fixture(scope="module")
def first(new_zygote, tmp_path_factory):
    """The first tree with a common/ for the zygote, which keeps its modules; and what a rank printed of them."""
    tree = make_tree(tmp_path_factory.mktemp("first") / "tree")
    given = given_common(tree, COURSE)
    record = tree / "common/record.py"
    before = record.read_text()
    change(tree, "MINE = 'mine'")  # after the look
    words = printed(tree, given)
    record.write_text(before)
    return tree, words


def test_no_line_of_the_tree_runs_in_the_process_that_forks_ranks(first):
    tree, words = first

    assert words[:3] == ["True", str(tree), "ours"]


def test_a_second_tree_imports_its_own(first, tmp_path):
    second = make_tree(tmp_path / "second")

    assert printed(second, given_common(second, COURSE))[:3] == ["False", str(second), "ours"]


def test_a_rank_starts_with_the_modules_of_an_unchanged_common_and_a_changed_one_counts(first):
    tree, _ = first
    assert printed(tree, given_common(tree, COURSE))[:3] == ["True", str(tree), "ours"]

    change(tree, "MINE = 'mine'")

    assert given_common(tree, COURSE) is None
    assert printed(tree, None)[:3] == ["False", str(tree), "mine"]


def test_a_solved_region_in_common_is_no_change_but_a_missing_file_is(tmp_path):
    tree = make_tree(tmp_path / "tree")
    (tree / "common/data_partition.py").write_text("solved = True\n")
    assert given_common(tree, COURSE) is not None

    (tree / "common/optim.py").unlink()
    assert given_common(tree, COURSE) is None
