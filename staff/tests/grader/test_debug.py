"""grader.debug in a terminal: where it stops, what can be asked there, and that nothing runs on."""

import re
import shutil
import subprocess
import sys

import pytest

from common.paths import ROOT
from staff.tests.grader.terminals import in_terminal

pytestmark = pytest.mark.medium

FILE = "task2a_gather_scatter/run_glue.py"
COMMAND = ("-m", "grader.debug", "2a.3", "--tree")


@pytest.fixture
def tree(tmp_path):
    """A student's tree with a solved 2a.3, as the handout marks it."""
    for folder in ("common", "task2a_gather_scatter"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / FILE
    path.write_text(re.sub(r" *# BEGIN SOLUTION .*\n", "", path.read_text()).replace("# END SOLUTION", "# END TODO"))
    return tmp_path


def put(tree, statement):
    """Put a statement in front of the region's lines."""
    path = tree / FILE
    path.write_text(re.sub(r"(\n( *)# TODO\(cos598d\) 2a\.3.*\n)", rf"\1\2{statement}\n", path.read_text()))


def test_a_breakpoint_stops_one_rank_and_after_c_the_run_ends_with_its_verdict(tree):
    put(tree, "breakpoint()")
    with in_terminal(*COMMAND, tree, "--rank", "1") as shown:
        shown.wait_for("(Pdb, rank 1) ")
        shown.type("p 100 + world_size\n")
        shown.wait_for("103")
        for _ in range(2):  # the run calls the function twice
            shown.wait_for("(Pdb, rank 1) ")
            shown.type("c\n")
        code, last = shown.end()

    assert code == 0
    assert last.splitlines()[1:] == ["test_gather_and_scatter_leave_the_mean_on_every_worker: passed"]


def test_where_there_is_no_terminal_one_line_says_so(tree):
    done = subprocess.run(
        [sys.executable, *COMMAND, tree], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )

    assert done.returncode != 0
    assert (
        done.stdout + done.stderr
        == "error: expected a terminal to debug in, got a file or a pipe as stdin; run this in a terminal\n"
    )
