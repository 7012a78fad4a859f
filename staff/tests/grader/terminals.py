"""Runs a command in a terminal, as a student does: what it shows, what is typed there, and that nothing runs on."""

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.paths import ROOT
from grader.wire.processes import descendants
from staff.tests.cluster.started_processes import wait_for

SECONDS = 60  # for the graders to load torch on a busy machine


class Terminal:
    """A command with a terminal of its own, and what that shows."""

    def __init__(self, *words):
        self.output = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, if these tests run in the background of a shell
            os.chdir(ROOT)
            os.execve(sys.executable, [sys.executable, *map(str, words)], os.environ | {"TERM": "dumb"})

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

    def type(self, keys):
        os.write(self.fd, keys.encode())

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


@contextmanager
def in_terminal(*words) -> Iterator[Terminal]:
    """`python` with these words."""
    shown = Terminal(*words)
    try:
        yield shown
    finally:
        shown.close()
