"""A process with torch loaded and one thread, which forks each rank in milliseconds.

One zygote serves one grader process, over one socket; when that socket closes, for whatever reason, all that the
zygote ever started is killed and it exits. Its requests: "run" (with the ranks' descriptors) forks the ranks, "stacks"
lets them write where they are, "measure" asks for their memory, "end" kills what is left of them. It reports "ready",
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from grader.inside import preload
from grader.inside.find import ROOT, find_function
from grader.inside.given_modules import GivenModules
from grader.inside.huge_pages import WORTH_FROM, HugePages
from grader.inside.printing import Stream
from grader.wire import values
from grader.wire.processes import CONFINE, KILL_TIME, PER_RANK, descendants, kill_all, memory
from grader.wire.values import Fields

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
UNKNOWN = -1  # number of processes
COUNT_PAUSE = 0.02  # seconds between two looks at the processes that ranks have started
LATER_PAUSE = 0.2  # the same once there are as many as wanted: there may be more
MOST_MEMORY = 1 << 30  # bytes that a rank may take for itself; a right solution needs a tenth
NUMBERS = 1 << 31  # what a process is told fits into a C int


def confine(rank: int, folder: str, probe: str, allows: Sequence[str]) -> None:
    """The walls of a freshly forked rank, before any student code runs in it.

    Here: a session of its own, death together with the zygote, no core files, a folder of its own. Harder walls
    (another user, limits, seccomp) belong to the function named by COS598D_CONFINE, called last, with the same
    arguments and the policy that follows its name; if it raises, the rank does not start.

    `allows`: what this rank alone may do, see grader/in_rank.py.
    """
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    function, _, policy = os.environ.pop(CONFINE, "").partition(" ")
    if function:
        find_function(function)(rank, folder, probe, allows, policy)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _tell(pid: int, number: int) -> None:
    """SIGUSR2 with a number, which Linux gives to sigtimedwait as `si_status`. Nothing where the process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).sigqueue(pid, signal.SIGUSR2, ctypes.c_void_p(number))


def _give_back() -> None:
    """Return what malloc keeps for later to the system: a rank that used it would not seem to take any memory."""
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
        self.wanted, self.most = 0, 0  # processes that a run asks the ranks to have at once, and how many were seen
        self.numbers: dict[int, int] = {}  # pid of such a process -> what it was told
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
        """Until the grader closes its end."""
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
        self._load(preload.needs(request["preload"]), request["probe"], request["given"])
        assert len(os.listdir("/proc/self/task") if sys.platform == "linux" else "1") == 1, "a thread would be lost"
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        if request["measures"]:
            _give_back()
        self.forked_with = memory(os.getpid())
        for rank in range(size):
            folder = os.path.join(self.folder, f"rank{rank}-{secrets.token_hex(8)}")
            os.mkdir(folder)
            pid = os.fork()
            if pid == 0:
                own = fds[PER_RANK * rank : PER_RANK * (rank + 1)]
                if request["measures"]:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing is hidden in files: they hold no byte
                limit_memory()
                if not self.given.fit(request["given"]):
                    self.given.forget()
                terminal = request["terminals"].get(str(rank), "")
                become_rank(rank, folder, request["probe"], request["allows"], terminal, *own)
            self.ranks[pid] = rank
        self.forked += size
        for fd in fds:
            os.close(fd)
        self.wanted, self.most, self.numbers = request["children"], UNKNOWN, {}
        if self.wanted:
            self.count()
        self.report(kind="started", folder=self.folder, pids=[*self.ranks])

    def count(self) -> None:
        """Count the processes that the ranks have started, here, where no rank can answer for them. Once there are as
        many as wanted, each gets a signal: they wait for it, so that a slow machine misses none. With it comes a number
        that this process alone is told, and the grader at the end."""
        found = descendants(os.getpid(), set())
        if found.isdisjoint(self.ranks):
            return  # no /proc, or one that shows nothing
        found -= set(self.ranks)
        self.most = max(self.most, len(found))
        for pid in found - set(self.numbers) if self.most >= self.wanted else ():
            self.numbers[pid] = 1 + secrets.randbelow(NUMBERS - 1)
            _tell(pid, self.numbers[pid])

    def _load(self, needed: Iterable[str], probe: str, given: Fields | None) -> None:
        """Load the groups that a run needs, if they are not loaded, and its probe."""
        groups = [group for group in needed if group not in self.loaded]
        for group in groups:
            preload.load(group)
        if probe.startswith("grader."):
            find_function(probe)
        assert self.given.names or "common" not in sys.modules, "a probe's module must not import the tree at its top"
        if "scripts" in needed:
            self.given.load(given)
        if groups:
            self.loaded.update(groups)
            self.huge_pages.look()

    def stacks(self, _request: dict) -> None:
        """Each rank that lives writes its Python stack to its stack descriptor, even in an endless loop or a sleep."""
        for pid in self.ranks:
            os.kill(pid, signal.SIGUSR1)

    def measure(self, _request: dict) -> None:
        """Report how much memory each rank has taken since it was forked, the processes that it has started included.

        A process whose parent is gone hangs on the zygote: it counts for every rank.
        """
        families = {pid: {pid, *descendants(pid, set())} for pid in self.ranks}
        orphans = descendants(os.getpid(), set()).difference(*families.values())
        taken = {str(self.ranks[pid]): self._taken(family | orphans) for pid, family in families.items()}
        self.report(kind="memory", taken=taken)

    def _taken(self, family: set[int]) -> int:
        return sum(max(memory(pid) - self.forked_with, 0) for pid in family)

    def end(self, _request: dict) -> None:
        self.report(kind="gone", left=self.sweep(), children=self.most, numbers=[*self.numbers.values()])

    def reap(self) -> bool:
        """Report every rank that has ended, and bury orphans. False once there are no children at all."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid in self.ranks:
                    with contextlib.suppress(OSError):
                        self.report(kind="exit", rank=self.ranks.pop(pid), code=os.waitstatus_to_exitcode(status))
        return False

    def sweep(self) -> int:
        """Kill everything the ranks have started, and remove their folder. Returns how many were no ranks.

        As the subreaper the zygote is the ancestor of them all, double forks and new sessions included.
        """
        ranks, killed = set(self.ranks), set[int]()
        limit = time.monotonic() + KILL_TIME
        while self.reap() and time.monotonic() < limit:
            killed |= kill_all(self.left)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.ranks, self.folder = {}, ""
        return len(killed - ranks)

    def left(self) -> set[int]:
        self.reap()
        return descendants(os.getpid(), set(self.ranks))


def limit_memory() -> None:
    """Let a loop that fills memory end with a MemoryError in its own line, before the machine has none left."""
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        most = int(status["VmData"].split()[0]) * 1024 + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def become_rank(
    rank: int, folder: str, probe: str, allows: Sequence[str], terminal: str, line: int, stdout: int, stderr: int,
    stack: int,
) -> NoReturn:  # fmt: skip
    """The forked child: nothing of the zygote's is left open, and it never returns into the zygote's loop.

    In a `terminal` it reads and writes there: somebody debugs it, see grader/debug.py.
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
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open for the life of the process)
        sys.stdout, sys.stderr = Stream(1, "stdout", bool(terminal)), Stream(2, "stderr", bool(terminal))
        faulthandler.enable(file=stack, all_threads=False)  # where a segmentation fault happened
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        confine(rank, folder, probe, allows)
        from grader.inside.context import run_probe

        run_probe(socket.socket(fileno=line))
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
    sys.path.remove(ROOT)  # from here on a student's `common` must not be found beside ours
    preload.load(preload.FIRST)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if CONFINE in os.environ:
        _prctl(PR_SET_DUMPABLE, 0)  # ranks are not to look into this memory, in which graders' secrets may be
    Zygote(socket.socket(fileno=descriptor)).serve()
    os._exit(0)  # without taking apart what torch and transformers have made, which takes half a second
