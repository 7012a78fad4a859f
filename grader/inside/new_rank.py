"""Makes a fresh process a rank: limits, a folder of its own, its output and its connection; a student's code runs last.

The process was forked by the zygote, or started by it (spawn.py).
"""

import faulthandler
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NoReturn

from grader.wire.processes import PDEATHSIG, give_back_blocks_from, limit_growth, prctl

OWN_PAGES = 128 << 10  # bytes; a tensor of this size has pages of its own where memory is measured
MOST_MEMORY = 1 << 30  # bytes that a rank may take for itself; a right solution needs a tenth
MOST_DESCRIPTORS = 256  # a zygote has fewer
# Called with a rank, its folder, what it alone may do, and whether its memory is measured.
BuildWalls = Callable[[int, str, Sequence[str], bool], None]


def isolate(rank: int, folder: str, allows: Sequence[str], measured: bool, build_walls: BuildWalls) -> None:
    """Isolate a freshly forked rank, before any student code runs in it.

    Here: a session of its own, death together with the zygote, no core files, a folder of its own. The walls, such as
    another user, limits and seccomp, are built last.

    `allows`: what this rank alone may do, see grader/in_rank.py.
    """
    os.setsid()
    prctl(PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    build_walls(rank, folder, allows, measured)


def prepare_to_be_measured() -> None:
    """Let a rank hide nothing in files, which hold no byte, and give back the memory of a tensor that it frees."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    give_back_blocks_from(OWN_PAGES)


def limit_memory() -> None:
    """Let a loop that fills memory end with a MemoryError in its own line, before the machine has none left."""
    limit_growth(MOST_MEMORY)


def become_rank(
    isolate_itself: Callable[[], None], terminal: str, connection: int, stdout: int, stderr: int, stack: int
) -> NoReturn:  # fmt: skip
    """Run a rank in the forked child: close all that belongs to the zygote, and never return into its loop.

    With a `terminal`, the rank reads and writes there: somebody debugs it, see grader/debug.py.
    """
    code = os.EX_SOFTWARE
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if terminal:
            stdin = stdout = stderr = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
        first, second = sorted((connection, stack))
        for begin, end in ((3, first), (first + 1, second), (second + 1, MOST_DESCRIPTORS)):
            os.closerange(begin, end)
        sys.stdout, sys.stderr = (  # line by line: a crash loses none
            open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        faulthandler.enable(file=stack, all_threads=False)  # where a segmentation fault happened
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        isolate_itself()
        from grader.inside.run_source import rank_main

        rank_main(socket.socket(fileno=connection))
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)
