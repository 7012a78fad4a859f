"""The zygote: a process with torch loaded and one thread, which forks each rank in milliseconds.

One zygote serves one grader process, over one socket. When that socket closes, for whatever reason, the zygote kills
all that it ever started, and exits. Its requests: "run" (with the ranks' descriptors) forks the ranks, "stacks" lets
them write where they are, "measure" asks for their memory, "end" kills what is left of them. It reports "ready",
"started", "exit", "memory" and "gone".
"""

import contextlib
import ctypes
import faulthandler
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from grader.inside import preload
from grader.inside.find import ROOT, find_function
from grader.inside.given_modules import GivenModules
from grader.inside.huge_pages import WORTH_FROM, HugePages
from grader.wire import values
from grader.wire.processes import CONFINE, KILL_TIME, PER_RANK, descendants, kill_all, memory
from grader.wire.values import Fields

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
UNKNOWN = -1  # as a count of processes
COUNT_PAUSE = 0.02  # seconds between two looks at the processes that ranks have started
LATER_PAUSE = 0.2  # the same once there are as many as wanted: there may be more
MOST_MEMORY = 1 << 30  # bytes that a rank may take for itself; a right solution needs a tenth
MAX_NUMBER = 1 << 31  # the number of a process fits into a C int


def confine(rank: int, folder: str, allows: Sequence[str]) -> None:
    """Confine a freshly forked rank, before any student code runs in it.

    Here: a session of its own, death together with the zygote, no core files, a folder of its own. COS598D_CONFINE
    names a function for more (another user, limits, seccomp). It is called last, with the same arguments and the
    policy that follows its name; if it raises, the rank does not start.

    `allows`: what this rank alone may do, see grader/in_rank.py.
    """
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    function, _, policy = os.environ.pop(CONFINE, "").partition(" ")
    if function:
        find_function(function)(rank, folder, allows, policy)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _send_number(pid: int, number: int) -> None:
    """Send SIGUSR2 with a number, which Linux gives to sigtimedwait as `si_status`. A process may be gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).sigqueue(pid, signal.SIGUSR2, ctypes.c_void_p(number))


def _free_spare_memory() -> None:
    """Give the memory that malloc keeps for later back to the system: a rank that uses it must seem to take memory."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a libc that has no such function
            ctypes.CDLL(None).malloc_trim(0)


class Zygote:
    """Serves the grader at the other end of `control`, one run at a time."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.ranks: dict[int, int] = {}  # pid -> rank, of the ranks that live
        self.forked = 0  # ranks, so far
        self.folder = ""
        self.forked_with = 0  # bytes of memory that a rank has when it is forked
        self.wanted, self.most = 0, 0  # processes that a run asks the ranks to have at once; the most that were counted
        self.numbers: dict[int, int] = {}  # pid of such a process -> the number that it got
        self.loaded = {preload.FIRST}
        self.given = GivenModules()
        self.huge_pages = HugePages()
        self.wakeup, sleeper = socket.socketpair()  # readable when a child has ended
        for end in (self.wakeup, sleeper):
            end.setblocking(False)
        self.sleeper = sleeper
        signal.set_wakeup_fd(sleeper.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a rank may be asked for its stack before it is ready

    def serve(self) -> None:
        """Serve requests until the grader closes its end."""
        self.report(kind="ready")
        self.huge_pages.look()
        try:
            while True:
                pause = None
                if self.wanted and self.ranks:
                    pause = COUNT_PAUSE if self.most < self.wanted else LATER_PAUSE
                elif self.huge_pages.left and not self.ranks and self.forked >= WORTH_FROM:
                    pause = 0.0
                readable, _, _ = select.select([self.control, self.wakeup], [], [], pause)
                if not readable and self.ranks:
                    self.count()
                elif not readable:
                    self.huge_pages.collapse_one()
                if self.wakeup in readable:
                    self.wakeup.recv(4096)
                    self.reap()
                if self.control in readable:
                    request = values.receive(self.control)
                    serve = {"run": self.run, "stacks": self.stacks, "measure": self.measure, "end": self.end}
                    serve[request["kind"]](request)
        except (EOFError, ConnectionError):
            pass  # the grader has ended or was killed
        finally:
            self.sweep()

    def report(self, **message) -> None:
        self.control.sendall(values.pack(message))

    def run(self, request: dict) -> None:
        """Fork the ranks. Each gets a temporary folder and its descriptors, which came along with the request."""
        size = request["world_size"]
        _, fds, _, _ = socket.recv_fds(self.control, 1, PER_RANK * size)
        self._load(request["preload"], request["given"])
        assert len(os.listdir("/proc/self/task") if sys.platform == "linux" else "1") == 1, "a thread would be lost"
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        if request["measures"]:
            _free_spare_memory()
        self.forked_with = memory(os.getpid())
        for rank in range(size):
            folder = os.path.join(self.folder, f"rank{rank}-{secrets.token_hex(8)}")
            os.mkdir(folder)
            pid = os.fork()
            if pid == 0:
                own_fds = fds[PER_RANK * rank : PER_RANK * (rank + 1)]
                if request["measures"]:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing is hidden in files: they hold no byte
                limit_memory()
                if not self.given.fit(request["given"]):
                    self.given.forget()
                terminal = request["terminals"].get(str(rank), "")
                become_rank(rank, folder, request["allows"], terminal, *own_fds)
            self.ranks[pid] = rank
        self.forked += size
        for fd in fds:
            os.close(fd)
        self.wanted, self.most, self.numbers = request["children"], UNKNOWN, {}
        if self.wanted:
            self.count()
        self.report(kind="started", folder=self.folder, pids=[*self.ranks])

    def count(self) -> None:
        """Count the processes that the ranks have started. Once there are as many as wanted, send each a number.

        This is done here, where no rank can give a false count. The processes wait for their number, so a slow machine
        misses none of them. Only the process itself and, at the end, the grader learn a number.
        """
        processes = descendants(os.getpid(), set())
        if processes.isdisjoint(self.ranks):
            return  # no /proc, or one that shows nothing
        processes -= set(self.ranks)
        self.most = max(self.most, len(processes))
        if self.most < self.wanted:
            return
        for pid in processes - set(self.numbers):
            self.numbers[pid] = 1 + secrets.randbelow(MAX_NUMBER - 1)
            _send_number(pid, self.numbers[pid])

    def _load(self, needed: Sequence[str], given: Fields | None) -> None:
        """Load the groups that a run needs, if they are not loaded."""
        groups = [group for group in needed if group not in self.loaded]
        for group in groups:
            preload.load(group)
        if "scripts" in needed:
            self.given.load(given)
        if groups:
            self.loaded.update(groups)
            self.huge_pages.look()

    def stacks(self, _request: dict) -> None:
        """Let each live rank write its Python stack to its stack descriptor, even in an endless loop or a sleep."""
        for pid in self.ranks:
            os.kill(pid, signal.SIGUSR1)

    def measure(self, _request: dict) -> None:
        """Report how much memory each rank, with the processes that it has started, has taken since it was forked.

        A process whose parent is gone becomes a child of the zygote: it counts for every rank.
        """
        families = {pid: {pid, *descendants(pid, set())} for pid in self.ranks}
        orphans = descendants(os.getpid(), set()).difference(*families.values())
        taken = {str(self.ranks[pid]): self._taken(family | orphans) for pid, family in families.items()}
        self.report(kind="memory", taken=taken)

    def _taken(self, family: set[int]) -> int:
        return sum(max(memory(pid) - self.forked_with, 0) for pid in family)

    def end(self, _request: dict) -> None:
        self.sweep()
        self.report(kind="gone", children=self.most, numbers=[*self.numbers.values()])

    def reap(self) -> bool:
        """Report every rank that has ended, and wait for dead orphans. Return False once there are no children."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid in self.ranks:
                    with contextlib.suppress(OSError):  # the grader has ended, and closed its end
                        self.report(kind="exit", rank=self.ranks.pop(pid), code=os.waitstatus_to_exitcode(status))
        return False

    def sweep(self) -> None:
        """Kill everything the ranks have started, and remove their folder.

        The zygote is the ancestor of them all, double forks and new sessions included, because it is a subreaper.
        """
        limit = time.monotonic() + KILL_TIME
        while self.reap() and time.monotonic() < limit:
            kill_all(self.descendants_left)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.ranks, self.folder = {}, ""

    def descendants_left(self) -> set[int]:
        """Return the processes that ranks have started and that still run."""
        self.reap()
        return descendants(os.getpid(), set(self.ranks))


def limit_memory() -> None:
    """Let a loop that fills memory end with a MemoryError in its own line, before the machine has none left."""
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        most = int(status["VmData"].split()[0]) * 1024 + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def become_rank(
    rank: int, folder: str, allows: Sequence[str], terminal: str, line: int, stdout: int, stderr: int, stack: int
) -> NoReturn:  # fmt: skip
    """Run a rank in the forked child: close all that belongs to the zygote, and never return into its loop.

    With a `terminal`, the rank reads and writes there: somebody debugs it, see grader/debug.py.
    """
    code = 70
    sys.dont_write_bytecode = True  # a student's tree stays as it is
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if terminal:
            stdin = stdout = stderr = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
        for fd in range(3, 256):
            if fd not in (line, stack):
                with contextlib.suppress(OSError):
                    os.close(fd)
        sys.stdout, sys.stderr = (  # line by line: a crash loses none
            open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        faulthandler.enable(file=stack, all_threads=False)  # where a segmentation fault happened
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        confine(rank, folder, allows)
        from grader.inside.run_source import run_rank

        run_rank(socket.socket(fileno=line))
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def main(descriptor: int) -> None:
    """Load what every rank needs, then serve the grader on an inherited descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # a limit that the grader has for its own memory
    sys.path.remove(ROOT)  # from here on a student's `common` must not be found beside the grader's
    preload.load(preload.FIRST)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if CONFINE in os.environ:
        _prctl(PR_SET_DUMPABLE, 0)  # ranks must not read this memory, which may hold the graders' secrets
    Zygote(socket.socket(fileno=descriptor)).serve()
    os._exit(0)  # skips the cleanup of torch and transformers, which takes half a second
