"""grader.watch as a student uses it: files are saved, and what is printed says what became of them."""

import os
import pty
import queue
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from common.paths import ROOT
from course.table import load_course
from grader.report import Entry
from grader.watch import CLEAR, KEYS, OneGrading, Watch, first_region, keys, show
from grader.wire.processes import descendants
from tests.own.started_processes import wait_for

pytestmark = pytest.mark.medium

COURSE = load_course()
FILE = "common/data_partition.py"
TODO = "        # TODO(cos598d) 2b.2: do it\n        {0}\n        # END TODO 2b.2"
OPEN = 'raise NotImplementedError("TODO 2b.2: do it")'
WRONG, RIGHT = "return self.data[index]", "return self.data[self.index[index]]"


class Student:
    """A tree in which only 2b.2 is open, and `grader.watch` at work on it."""

    def __init__(self, folder):
        self.path = folder / FILE
        shutil.copytree(ROOT / "common", folder / "common", ignore=shutil.ignore_patterns("__pycache__"))
        solved = (ROOT / FILE).read_text()
        begin, end = solved.index("        # TODO(cos598d) 2b.2"), solved.index("        # END SOLUTION 2b.2")
        self.parts = solved[:begin], solved[end + len("        # END SOLUTION 2b.2") :]
        self.save(OPEN)
        command = [sys.executable, "-u", "-m", "grader.watch", "2b.2", "--tree", str(folder)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self.new: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            self.new.put(line)

    def save(self, body):
        self.path.write_text(self.parts[0] + TODO.format(body) + self.parts[1])

    def wait_for(self, words):
        """The next line with these words."""
        while words not in (line := self.new.get(timeout=120)):
            pass
        return line


@pytest.fixture
def student(tmp_path):
    started = Student(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()
    started.reader.join()
    started.process.stdout.close()


def test_each_save_is_graded_and_a_half_saved_file_and_ctrl_c_do_no_harm_and_nothing_runs_on(student):
    student.wait_for("2b.2 Partition.__getitem__ is not written yet: common/data_partition.py")
    student.wait_for("watching; press Ctrl-C to stop")
    student.save(WRONG)
    student.wait_for("wrong: ")
    student.save("return self.data[")
    student.wait_for("while loading")
    student.save(RIGHT)
    student.wait_for("2/2")

    started = descendants(student.process.pid, set())
    student.process.send_signal(signal.SIGINT)

    assert student.process.wait(30) == 0
    assert not any("Traceback" in line for line in student.lines)
    assert started
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started), "the end of all processes")


def graded(*messages):
    """A grading of tests of these regions with these messages, "" for one that has passed."""
    run = OneGrading()
    for number, (region, message) in enumerate(messages):
        status, points = ("wrong", 0) if message else ("passed", 2)
        run.entries.append(Entry(f"tests/test_a.py::test_{number}", "2b", region, status, points, 2, message))
    return run


LONG = "every gradient is 3.000 times the mean on 3 workers: " + "did you divide by world_size after the sum? " * 4


def test_on_a_small_terminal_the_first_cause_is_on_the_screen_and_no_word_is_cut(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    causes = [("4.1", LONG + "\n" + "  a line of the script\n" * 30), *(("4.1", f"cause {n}") for n in "abcdefghij")]

    show(Watch(COURSE, ROOT, "4.1").lines_of(graded(*causes), "4.1"))

    screen = capsys.readouterr().out.removeprefix(CLEAR).splitlines()
    assert max(map(len, screen)) <= 80
    assert len(screen) < 24
    assert screen[1].startswith("  wrong: every gradient is 3.000 times the mean on 3 workers: did you divide by")
    assert set(" ".join(screen[1:5]).split()) <= {"wrong:", *LONG.split()}
    assert screen[-2].endswith("more lines")
    assert screen[-1] == KEYS


def test_keys_are_read_one_by_one_and_only_when_somebody_asks(monkeypatch):
    terminal, stdin = pty.openpty()
    with os.fdopen(stdin, "r") as file, os.fdopen(terminal, "wb", buffering=0) as keyboard:
        monkeypatch.setattr("sys.stdin", file)
        with keys() as pressed:
            assert pressed() == ""
            keyboard.write(b"hq")
            wait_for(lambda: pressed() == "h", "the key")
            assert [pressed(), pressed()] == ["q", ""]


def test_it_begins_with_the_region_or_the_task_that_was_asked_for(tmp_path):
    assert first_region(COURSE, tmp_path, "2a.3") == ("2a.3", "")
    assert first_region(COURSE, tmp_path, "task2b") == ("2b.1", "2b")
    with pytest.raises(ValueError, match=r"expected a region or a task, such as 1\.1 or task1"):
        first_region(COURSE, tmp_path, "9.9")
