"""grader.debug in a real pseudo-terminal: where it stops, what can be asked there, and that nothing runs on."""

import os
import pdb
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import weakref

import pytest

from common.paths import ROOT
from grader import debug
from grader.inside.debugger import Debugger
from grader.wire.processes import descendants
from tests.own.started_processes import wait_for

pytestmark = pytest.mark.medium

FILE = "task2a_gather_scatter/run_glue.py"
SECONDS = 60  # for the graders to load torch on a busy machine


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


class Terminal:
    """`python -m grader.debug` with a terminal of its own, and what that shows."""

    def __init__(self, tree, *arguments):
        self.output = ""
        command = [sys.executable, "-m", "grader.debug", "2a.3", "--tree", str(tree), *arguments]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, if these tests run in the background of a shell
            os.chdir(ROOT)
            os.execve(sys.executable, command, os.environ | {"TERM": "dumb"})

    def read(self):
        """What is there now; False once the terminal has closed."""
        if select.select([self.fd], [], [], 0.05)[0]:
            try:
                self.output += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                return False
        return True

    def wait_for(self, words):
        limit = time.monotonic() + SECONDS
        while words not in self.output:
            assert self.read() and time.monotonic() < limit, f"no {words!r} in: {self.output}"
        before, _, self.output = self.output.partition(words)
        return before

    def type(self, line):
        os.write(self.fd, line.encode() + b"\n")

    def end(self):
        """Read to the end: the exit code and the last lines. Nothing that was started is left."""
        started = descendants(self.pid, set())
        limit = time.monotonic() + SECONDS
        while self.read():
            assert time.monotonic() < limit, f"it has not ended: {self.output}"
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started), "the end of all processes")
        return os.waitstatus_to_exitcode(status), self.output

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal():
    opened = []

    def open_one(*arguments):
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_a_breakpoint_stops_one_rank_and_after_c_the_run_ends_with_its_verdict(tree, terminal):
    put(tree, "breakpoint()")
    shown = terminal(tree, "--rank", "1")

    shown.wait_for("(Pdb, rank 1) ")
    shown.type("p 100 + world_size")
    shown.wait_for("103")
    shown.wait_for("(Pdb, rank 1) ")
    shown.type("c")
    shown.wait_for("(Pdb, rank 1) ")  # the run calls the function once more
    shown.type("c")
    code, last = shown.end()

    assert code == 0
    assert last.splitlines()[1:] == ["test_gather_and_scatter_leave_the_mean_on_every_worker: passed"]


@pytest.mark.proof
@pytest.mark.parametrize("how", ["q", "\x03"], ids=["q", "Ctrl-C"])
def test_without_a_breakpoint_it_stops_at_the_region_and_ends_without_a_trace(tree, terminal, how):
    shown = terminal(tree)

    assert FILE in shown.wait_for("(Pdb, rank 0) ")
    os.write(shown.fd, how.encode() + (b"\n" if how == "q" else b""))
    code, last = shown.end()

    assert code in (0, 130)
    assert "Traceback" not in last


@pytest.mark.proof
def test_a_breakpoint_under_the_graders_names_this_command(tree):
    put(tree, "breakpoint()")
    command = [sys.executable, "-m", "pytest", "-q", "--region", "2a.3", f"--tree={tree}"]

    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout

    assert "`python -m grader.debug 2a.3 --rank 0` instead" in output


def test_where_there_is_no_terminal_one_line_says_so(tree):
    command = [sys.executable, "-m", "grader.debug", "2a.3", "--tree", str(tree)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert done.returncode != 0
    assert (
        done.stdout + done.stderr
        == "error: expected a terminal to debug in, got a file or a pipe as stdin; run this in a terminal\n"
    )


def test_each_part_of_a_region_has_one_stop_at_its_first_statement(tmp_path):
    part = "    # TODO(cos598d) 9.1: do it\n    # why\n    {0}\n    y = 2\n    # END TODO 9.1\n"
    (tmp_path / "f.py").write_text("def f():\n" + part.format("x = 1") + "\ndef g():\n" + part.format("x = 3"))

    assert debug.first_lines(tmp_path, "f.py", "9.1") == [(str(tmp_path / "f.py"), 4), (str(tmp_path / "f.py"), 11)]

    (tmp_path / "f.py").write_text("def f():\n" + part.format("breakpoint()"))
    assert debug.first_lines(tmp_path, "f.py", "9.1") == []


def test_the_debugger_keeps_nothing_of_a_function_that_it_has_stopped_in(monkeypatch):
    class Pipe:
        """What a test waits to see deleted."""

    pipes = [Pipe()]
    left = weakref.ref(pipes[0])
    stops_in = {"self": pipes[0]}
    monkeypatch.setattr(pdb.Pdb, "interaction", lambda self, frame: setattr(self, "curframe_locals", stops_in.copy()))
    debugger = Debugger(0, lambda words: None)

    debugger.interaction(None)
    pipes.clear()
    stops_in.clear()

    assert left() is None
