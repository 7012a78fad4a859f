"""grader.watch as a student uses it: files are saved, keys are pressed, and the screen says what became of them."""

import shutil

import pytest

from common.paths import ROOT
from grader.watch import CLEAR, KEYS
from staff.tests.grader.terminals import in_terminal
from staff.tests.handouts import solved_handout

pytestmark = pytest.mark.medium

FILE = "common/data_partition.py"
OPEN = 'raise NotImplementedError("TODO 2b.2: do it")'
WRONG, RIGHT = "return self.data[index]", "return self.data[self.index[index]]"
USE, WRONG_USE = "return Partition(self.data, self.partitions[partition])", "return None"
HALF_SAVED = "return self.data[" + "self.index[index] + " * 20


def save(tree, body, use=USE):
    """Save the file with these lines in 2b.2 and 2b.4; all its other regions are solved."""
    text = solved_handout()[FILE].decode()
    (tree / FILE).write_text(text.replace(RIGHT, body).replace(USE, use))


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
        save(tmp_path, WRONG, WRONG_USE)
        shown.wait_for("grading 2b.4")  # 2b.2 has been graded as it is
        shown.wait_for(KEYS)
        shown.wait_for(KEYS)
        save(tmp_path, HALF_SAVED, WRONG_USE)
        cause = shown.wait_for("while loading common/data_partition.py").rpartition(CLEAR)[2].splitlines()
        rest = shown.wait_for(KEYS).splitlines()
        shown.type("hh")
        shown.wait_for("hint 1 of 3")
        shown.wait_for("hint 2 of 3")
        save(tmp_path, RIGHT, WRONG_USE)
        shown.wait_for("2b.2 Partition.__getitem__ passes: 2/2 points")
        shown.type("\x03")
        code, last = shown.end()

    assert code == 0 and "Traceback" not in last
    assert cause[1].startswith("  crashed: rank 0 raised SyntaxError")
    assert len(cause) + len(rest) < 24 and max(map(len, cause + rest[1:])) <= 80
