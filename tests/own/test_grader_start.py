"""How little a graded run waits for: which test files pytest opens, and what the zygote has loaded before it forks."""

import re

import pytest

from common.paths import ROOT
from course.table import load_course
from grader import imports, ranks
from grader.inside import preload
from grader.selection import files_to_open
from tests.own.started_processes import run

pytestmark = pytest.mark.medium

COURSE = load_course()


def test_a_marker_opens_the_test_files_of_its_tasks_only():
    wanted = {file for task in ("2a", "p") for file in (*COURSE.tasks[task].tests, *COURSE.tasks[task].whole)}

    assert files_to_open(COURSE, None, "task2a or a4_2_1") == wanted


@pytest.mark.parametrize("markers", ["not slow", "task2a and not slow", "medium", "task2a or medium", "not task2a"])
def test_where_the_table_cannot_tell_every_file_is_opened(markers):
    assert files_to_open(COURSE, None, markers) is None


def test_every_region_of_the_table_opens_its_tests():
    assert {id: files_to_open(COURSE, id, "") for id in COURSE.regions} == {
        id: set(row.tests) for id, row in COURSE.regions.items()
    }


def test_a_region_opens_the_test_files_of_its_row_only_and_selects_its_tests():
    code = "import sys, pytest; pytest.main(sys.argv[1:]); print(*sorted(m for m in sys.modules if 'test_' in m))"
    *named, last = run("-c", code, "-q", "--collect-only", "--region", "1.2").stdout.splitlines()

    opened = {name.rpartition(".")[2] for name in last.split() if name.startswith("tests.")}
    assert "test_loop" in opened and opened.isdisjoint({"test_pipe", "test_partitions", "test_start", "test_ring"})
    assert [line.rpartition("::")[2] for line in named if "::" in line] == [
        "test_backward_gives_the_gradient_of_the_batch", "test_every_batch_has_a_gradient_of_its_own",
    ]  # fmt: skip


def test_a_run_of_torch_alone_does_not_wait_for_transformers_and_a_later_one_has_it(tmp_path):
    ranks.stop()
    (tmp_path / "common").mkdir()
    (tmp_path / "common/data_partition.py").write_text(
        "import sys\nslow = {'transformers', 'transformers.modeling_utils'} & set(sys.modules)\n"
        "if slow:\n    raise RuntimeError(f'loaded: {sorted(slow)}')\n"
    )
    (tmp_path / "run_glue.py").write_text((tmp_path / "common/data_partition.py").read_text())

    partition = {
        "file": "common/data_partition.py",
        "preload": imports.libraries(ROOT, "common/data_partition.py", COURSE),
    }
    alone = ranks.run("grader.inside.context:load", 1, partition, tree=tmp_path)
    script = ranks.run("grader.inside.context:load", 1, {"file": "run_glue.py"}, tree=tmp_path)
    again = ranks.run("grader.inside.context:load", 1, partition, tree=tmp_path)

    assert alone.outcome == "returned"
    assert "loaded: ['transformers'" in script.explain()
    assert "loaded: ['transformers'" in again.explain()


def test_a_run_that_states_no_group_waits_for_all():
    assert set(preload.needs(None)) == set(preload.GROUPS)


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
