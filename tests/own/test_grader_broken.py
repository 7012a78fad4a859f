"""A student's broken file costs the points of that file and no others, and says what is wrong with it."""

import json
import shutil

import pytest

from common.paths import ROOT
from course.table import load_course
from staff.handout.assemble import assemble
from tests.own.started_processes import run

COURSE = load_course()
FLOOD = "import sys\nfor line in range(20_000):\n    print('line', line)\n    print('line', line, file=sys.stderr)\n"
# Lines at the top of a file, and the words that each of its tests must say; "" where the file is right all the same.
BROKEN = {
    "task1_single/run_glue.py": ("import os\nos.kill(os.getpid(), 9)\n", "was killed by SIGKILL"),
    "task2a_gather_scatter/run_glue.py": ("import sys\nsys.exit(0)\n", "exited with code 0"),
    "task2b_allreduce/run_glue.py": ("def train(:\n", "SyntaxError"),
    "task2b_allreduce/run_gpt2.py": ("import no_such_module\n", "no_such_module"),
    "task3_ddp/run_glue.py": (FLOOD, ""),
    "task3_ddp/run_gpt2.py": ("raise NotImplementedError('TODO')\n", "is not written yet"),
    "common/data_partition.py": ("", ""),
}
TESTS = [  # of each file, and one that looks at the imports of two, of which the first is broken
    "tests/task1/test_bert.py::test_the_pretrained_weights_are_loaded",
    "tests/start/test_joining.py::test_the_group_is_joined_where_and_as_it_was_told",
    "tests/gradients/test_averaging.py::test_all_reduce_leaves_the_mean_on_every_worker",
    "tests/start/test_start.py::test_task2b_imports_only_what_the_course_allows",
    "tests/start/test_start.py::test_every_worker_is_started_and_waited_for",
    "tests/training/test_ddp.py::test_the_wrapped_model_averages_in_its_backward_pass",
    "tests/training/test_ddp.py::test_the_wrapped_gpt2_averages_in_its_backward_pass",
    "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices",
]


def graded(folder, *tests):
    """Grade folder/tree; return the report's tests, and what is printed."""
    options = ["-q", "-p", "no:cacheprovider", f"--tree={folder / 'tree'}", "--report", folder / "report.json"]
    done = run("-m", "pytest", *options, *tests, timeout=400)
    return json.loads((folder / "report.json").read_text())["tests"], done.stdout


@pytest.mark.medium
def test_a_file_that_does_not_load_costs_its_own_points_only(tmp_path):
    for folder in {file.split("/")[0] for file in BROKEN}:
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, (lines, _) in BROKEN.items():
        path = tmp_path / "tree" / file
        path.write_text(lines + path.read_text())

    entries, _ = graded(tmp_path, *TESTS)

    assert {entry["id"] for entry in entries} == set(TESTS)
    for entry in entries:
        imports = "imports_only" in entry["id"]
        words = BROKEN["task2b_allreduce/run_glue.py" if imports else COURSE.regions[entry["region"]].file][1]
        assert (entry["points"] == entry["max_points"]) == (words == ""), entry
        assert words in entry["message"], entry


@pytest.mark.proof
def test_a_region_whose_placeholder_was_left_in_is_told_to_delete_it(tmp_path):
    file = tmp_path / "tree/task1_single/run_glue.py"
    file.parent.mkdir(parents=True)
    shutil.copytree(ROOT / "common", tmp_path / "tree/common", ignore=shutil.ignore_patterns("__pycache__"))
    handout = assemble(ROOT, solved=set(COURSE.regions) - {"1.1"}).files["task1_single/run_glue.py"].decode()
    (line,) = [line for line in handout.splitlines() if 'NotImplementedError("TODO 1.1' in line]
    file.write_text(handout.replace(line, f"    model = None\n{line}"))

    _, said = graded(tmp_path, "--region", "1.1", "tests/task1/test_bert.py")

    assert 'its line `raise NotImplementedError("TODO 1.1: ...")` is still there, and was reached: delete it' in said
    assert "next: 1.1;" in said
