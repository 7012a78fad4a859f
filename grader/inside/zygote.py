"""The zygote: a process with torch loaded and one thread, which forks each rank in milliseconds. Where such a process
cannot fork, it starts ranks as new processes, see spawn.py.

One zygote serves one grader process, over one socket. When that socket closes, for whatever reason, the zygote kills
all that it ever started, and exits. Its requests: "run" (with the ranks' descriptors) forks the ranks, "stacks" lets
them write where they are, "end" kills what is left of them. It reports "ready", "started", "exit" and "gone".
"""

import contextlib
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
from functools import partial

from grader.inside import preload, spawn
from grader.inside.checkout import ROOT, find_function
from grader.inside.new_rank import BuildWalls, become_rank, isolate, limit_memory, prepare_to_be_measured
from grader.wire import values
from grader.wire.processes import (
    CONFINE,
    DUMPABLE,
    KILL_TIME,
    PER_RANK,
    SUBREAPER,
    descendants,
    kill_all,
    prctl,
    threads,
)  # fmt: skip
from grader.wire.values import Fields


def find_walls(words: str) -> BuildWalls:
    """Return what builds the walls around every rank; `words`, from COS598D_CONFINE, name a function and its policy.

    It is loaded once, and called in each rank; if it raises, the rank does not start. Without words, there are none.
    """
    name, _, policy = words.partition(" ")
    if not name:
        return lambda *_: None
    build = find_function(name)
    return lambda *arguments: build(*arguments, policy)


class Zygote:
    """Serves the grader at the other end of `control`, one run at a time."""

    def __init__(self, control: socket.socket, build_walls: BuildWalls, forks: bool = True) -> None:
        self.control, self.build_walls, self.forks = control, build_walls, forks
        self.spares = spawn.Spares()
        self.ranks: dict[int, int] = {}  # pid -> rank, of the ranks that live
        self.folder = ""
        self.loaded = {preload.FIRST}
        self.given: Fields | None = None  # the tree whose common/ is loaded
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
        try:
            if not self.forks:
                self.spares.fill()
            while True:
                readable, _, _ = select.select([self.control, self.wakeup], [], [])
                if self.wakeup in readable:
                    self.wakeup.recv(4096)
                    self.reap()
                if self.control in readable:
                    request = values.receive(self.control)
                    {"run": self.run, "stacks": self.stacks, "end": self.end}[request["kind"]](request)
        except (EOFError, ConnectionError):
            pass  # the grader has ended or was killed
        finally:
            self.sweep()

    def report(self, **message) -> None:
        self.control.sendall(values.pack(message))

    def run(self, request: dict) -> None:
        """Start the ranks. Each gets a temporary folder and its descriptors, which came along with the request."""
        size = request["world_size"]
        _, fds, _, _ = socket.recv_fds(self.control, 1, PER_RANK * size)
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        folders = [os.path.join(self.folder, f"rank{rank}-{secrets.token_hex(8)}") for rank in range(size)]
        for folder in folders:
            os.mkdir(folder)
        own_fds = [fds[PER_RANK * rank : PER_RANK * (rank + 1)] for rank in range(size)]
        pids = self._fork(request, folders, own_fds) if self.forks else self._spawn(request, folders, own_fds)
        self.ranks = {pid: rank for rank, pid in enumerate(pids)}
        for fd in fds:
            os.close(fd)
        self.report(kind="started", folder=self.folder, pids=pids)

    def _fork(self, request: dict, folders: list[str], own_fds: list[list[int]]) -> list[int]:
        self._load(request["preload"], request["given"])
        assert threads() == 1, "another one would be lost"
        pids = []
        for rank, folder in enumerate(folders):
            pid = os.fork()
            if pid == 0:
                if request["measures"]:
                    prepare_to_be_measured()
                limit_memory()
                if request["given"] != self.given:
                    preload.forget_common()
                isolate_it = partial(isolate, rank, folder, request["allows"], request["measures"], self.build_walls)
                become_rank(isolate_it, request["terminals"].get(str(rank), ""), *own_fds[rank])
            pids.append(pid)
        return pids

    def _spawn(self, request: dict, folders: list[str], own_fds: list[list[int]]) -> list[int]:
        starts = [
            {
                "rank": rank,
                "folder": folder,
                "terminal": request["terminals"].get(str(rank), ""),
                "preload": request["preload"],
                "measures": request["measures"],
            }
            for rank, folder in enumerate(folders)
        ]
        return self.spares.take(starts, own_fds)

    def _load(self, needed: Sequence[str], given: Fields | None) -> None:
        """Load the groups that a run needs, if they are not loaded."""
        for group in needed:
            if group not in self.loaded:
                preload.load(group)
                self.loaded.add(group)
        if "scripts" in needed and given and not self.given:
            self.given = given
            preload.load_common(given["tree"])

    def stacks(self, _request: dict) -> None:
        """Let each live rank write its Python stack to its stack descriptor, even in an endless loop or a sleep."""
        for pid in self.ranks:
            os.kill(pid, signal.SIGUSR1)

    def end(self, _request: dict) -> None:
        self.sweep()
        self.report(kind="gone")

    def reap(self) -> None:
        """Report every rank that has ended, and wait for dead orphans."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.spares.forget(pid)
                if pid in self.ranks:
                    with contextlib.suppress(OSError):  # the grader has ended, and closed its end
                        self.report(kind="exit", rank=self.ranks.pop(pid), code=os.waitstatus_to_exitcode(status))

    def sweep(self) -> None:
        """Kill everything the ranks have started, and remove their folder.

        The zygote is the ancestor of them all, double forks and new sessions included, because it is a subreaper.
        """
        limit = time.monotonic() + KILL_TIME
        while (self.descendants_left() or self.ranks) and time.monotonic() < limit:
            kill_all(self.descendants_left)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.ranks, self.folder = {}, ""

    def descendants_left(self) -> set[int]:
        """Return the live ranks and what they have started; where there is no /proc, the ranks alone."""
        self.reap()
        return descendants(os.getpid(), set(self.ranks)) - self.spares.connections.keys()


def main(descriptor: int, start_method: str) -> None:
    """Load what every rank needs, then serve the grader on an inherited descriptor.

    `start_method` of ranks: "fork", "spawn", or "" for fork where that works.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != hard:  # a limit that the grader has for its own memory
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    sys.path.remove(ROOT)  # from here on a student's `common` must not be found beside the grader's
    words = os.environ.pop(CONFINE, "")
    forks = start_method != "spawn" or bool(words)  # walls are Linux's, and built in a forked rank
    if forks:
        preload.load(preload.FIRST)
        forks = sys.platform == "linux" or start_method == "fork" or spawn.can_fork()
    sys.dont_write_bytecode = True  # a student's tree stays as it is
    prctl(SUBREAPER, 1)
    if words:
        prctl(DUMPABLE, 0)  # ranks must not read this memory, which may hold the graders' secrets
    Zygote(socket.socket(fileno=descriptor), find_walls(words), forks).serve()
    os._exit(0)  # skips the cleanup of torch and transformers, which takes half a second
