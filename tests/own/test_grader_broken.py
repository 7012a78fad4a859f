"""A student's broken file costs the points of that file and no others, and says what is wrong with it."""

import json
import shutil
import subprocess
import sys

import pytest

from common.paths import ROOT
from course.table import load_course
from staff.handout.assemble import assemble

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
# A test of each file, and one that looks at the imports of two.
FEW = (
    "pretrained_weights or group_is_joined or all_reduce_leaves_the_mean_on or average_gradients_leaves or indices or "
    "wrapped or task2b_imports"
)


@pytest.mark.parametrize(
    ("chosen", "least"),
    [pytest.param(FEW, 10, marks=pytest.mark.medium), pytest.param("test", 50, marks=pytest.mark.proof)],
    ids=["one test of each file", "every test"],
)
def test_a_file_that_does_not_load_costs_its_own_points_only(tmp_path, chosen, least):
    for folder in {file.split("/")[0] for file in BROKEN}:
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, (lines, _) in BROKEN.items():
        path = tmp_path / "tree" / file
        path.write_text(lines + path.read_text())
    report = tmp_path / "report.json"
    files = {file for task in ("1", "2a", "2b", "3") for file in COURSE.tasks[task].tests}
    tests = sorted(files - {"tests/test_copies.py"})
    options = ["-q", "-p", "no:cacheprovider", f"--tree={tmp_path / 'tree'}", "--report", str(report)]

    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", chosen, *tests], cwd=ROOT, capture_output=True, timeout=400
    )

    entries = json.loads(report.read_text())["tests"]
    assert len(entries) >= least
    assert {file_of(entry) for entry in entries} == set(BROKEN)
    for entry in entries:
        file = file_of(entry)
        assert (entry["points"] == entry["max_points"]) == (BROKEN[file][1] == ""), entry
        assert BROKEN[file][1] in entry["message"], entry


@pytest.mark.proof
def test_a_region_whose_placeholder_was_left_in_is_told_to_delete_it(tmp_path):
    file = "task1_single/run_glue.py"
    shutil.copytree(ROOT / "common", tmp_path / "tree" / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tree" / "task1_single").mkdir()
    handout = assemble(ROOT, solved=set(COURSE.regions) - {"1.1"}).files[file].decode()
    (line,) = [line for line in handout.splitlines() if 'NotImplementedError("TODO 1.1' in line]
    (tmp_path / "tree" / file).write_text(handout.replace(line, f"    model = None\n{line}"))
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        f"--tree={tmp_path / 'tree'}",
        "--region",
        "1.1",
        "tests/task1/test_bert.py",
    ]

    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True)

    assert (
        'its line `raise NotImplementedError("TODO 1.1: ...")` is still there, and was reached: delete it'
        in done.stdout
    )
    assert "next: 1.1;" in done.stdout


def file_of(entry):
    """The file that a test runs: the one of its region, or the first broken one of two whose imports it looks at."""
    if "imports_only" in entry["id"] and entry["task"] in ("2b", "3") and "data_partition" not in entry["id"]:
        return next(file for file in BROKEN if file.startswith(f"task{entry['task']}") and BROKEN[file][1])
    return COURSE.regions[entry["region"]].file
