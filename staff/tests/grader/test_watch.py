"""grader.watch as a student uses it: files are saved, keys are pressed, and the screen says what became of them."""

import shutil

import pytest

from common.paths import ROOT
from course.table import load_course
from grader.watch import CLEAR, KEYS
from staff.handout.regions import for_students
from staff.tests.grader.terminals import in_terminal

pytestmark = pytest.mark.medium

COURSE = load_course()
FILE = "common/data_partition.py"
OPEN = 'raise NotImplementedError("TODO 2b.2: do it")'
WRONG, RIGHT = "return self.data[index]", "return self.data[self.index[index]]"
USE, OTHER = "return Partition(self.data", "partition = int(partition); "
SOLVED = for_students((ROOT / FILE).read_bytes(), FILE, COURSE, list(COURSE.regions)).decode()
HALF_SAVED = "return self.data[" + "self.index[index] + " * 20


def save(tree, body, other=""):
    """Save the file with this line in 2b.2, and a statement more in 2b.4; the other regions are solved."""
    (tree / FILE).write_text(SOLVED.replace(RIGHT, body).replace(USE, other + USE))


def test_each_save_is_graded_on_one_screen_keys_are_heard_and_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))  # where the number of shown hints is kept
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    save(tmp_path, OPEN)
    with in_terminal("-m", "grader.watch", "2b.2", "--tree", tmp_path) as shown:
        shown.wait_for("2b.2 Partition.__getitem__ is not written yet: common/data_partition.py")
        shown.wait_for(KEYS)
        save(tmp_path, WRONG)
        shown.wait_for("wrong: ")
        shown.wait_for(KEYS)
        save(tmp_path, WRONG, OTHER)
        shown.wait_for("grading 2b.4")  # 2b.2 has been graded as it is
        shown.wait_for(KEYS)
        shown.wait_for(KEYS)
        save(tmp_path, HALF_SAVED, OTHER)
        cause = shown.wait_for("while loading common/data_partition.py").rpartition(CLEAR)[2].splitlines()
        rest = shown.wait_for(KEYS).splitlines()
        shown.type("hh")
        shown.wait_for("hint 1 of 3")
        shown.wait_for("hint 2 of 3")
        save(tmp_path, RIGHT, OTHER)
        shown.wait_for("2b.2 Partition.__getitem__ passes: 2/2 points")
        shown.type("\x03")
        code, last = shown.end()

    assert code == 0 and "Traceback" not in last
    assert cause[1].startswith("  crashed: rank 0 raised SyntaxError")
    assert len(cause) + len(rest) < 24 and max(map(len, cause + rest[1:])) <= 80
