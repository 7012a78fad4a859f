"""A student's broken file costs the points of that file and no others, and says what is wrong with it."""

import shutil

import pytest

from common.paths import ROOT
from course.table import load_course
from staff.grade.submissions import clean_files
from staff.proofs.grading_pool import function_of, grade
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
TESTS = (  # one of each file
    "tests/task1/test_bert.py::test_the_pretrained_weights_are_loaded",
    "tests/start/test_joining.py::test_the_group_is_joined_where_and_as_it_was_told",
    "tests/gradients/test_averaging.py::test_all_reduce_leaves_the_mean_on_every_worker",
    "tests/start/test_start.py::test_every_worker_is_started_and_waited_for",
    "tests/training/test_ddp.py::test_the_wrapped_model_averages_in_its_backward_pass",
    "tests/training/test_ddp.py::test_the_wrapped_gpt2_averages_in_its_backward_pass",
    "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices",
)
IMPORTS = "tests/start/test_start.py::test_task2b_imports_only_what_the_course_allows"  # of two files


@pytest.mark.medium
def test_a_file_that_does_not_load_costs_its_own_points_only(tmp_path):
    for folder in {file.split("/")[0] for file in BROKEN}:
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, (lines, _) in BROKEN.items():
        path = tmp_path / "tree" / file
        path.write_text(lines + path.read_text())

    graded = grade(tmp_path / "tree", [*TESTS, IMPORTS], seed=1)

    assert len(graded.results) == len(TESTS) + 1
    for file, test in [*zip(BROKEN, TESTS, strict=True), ("task2b_allreduce/run_glue.py", IMPORTS)]:
        status, message = graded.statuses[function_of(test)], graded.results[function_of(test)].message
        assert (status == "passed") == (BROKEN[file][1] == ""), message
        assert BROKEN[file][1] in message


@pytest.mark.proof
def test_a_region_whose_placeholder_was_left_in_is_told_to_delete_it(tmp_path):
    file = tmp_path / "tree/task1_single/run_glue.py"
    file.parent.mkdir(parents=True)
    shutil.copytree(ROOT / "common", tmp_path / "tree/common", ignore=shutil.ignore_patterns("__pycache__"))
    handout = clean_files(solved=set(COURSE.regions) - {"1.1"})["task1_single/run_glue.py"].decode()
    (line,) = [line for line in handout.splitlines() if 'NotImplementedError("TODO 1.1' in line]
    file.write_text(handout.replace(line, f"    model = None\n{line}"))

    words = ["-q", "-p", "no:cacheprovider", "--region", "1.1", f"--tree={tmp_path / 'tree'}"]
    output = run("-m", "pytest", *words, "tests/task1/test_bert.py").stdout

    assert 'its line `raise NotImplementedError("TODO 1.1: ...")` is still there, and was reached: delete it' in output
    assert "next: 1.1;" in output
