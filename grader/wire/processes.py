"""What both ends need for the ranks' processes: how many descriptors each gets, its memory, its end."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CONFINE = "COS598D_CONFINE"  # "package.module:function policy": builds the walls of every rank, see inside/zygote.py
KILL_TIME = 5  # seconds a killed process may take to be gone: one that the kernel holds must not hold the grader
PER_RANK = 4  # descriptors: the connection to the grader, stdout, stderr, stack
PDEATHSIG, DUMPABLE, SUBREAPER = 1, 4, 36  # of prctl(2)
M_MMAP_THRESHOLD = -3  # of mallopt(3)


def prctl(option: int, *values: object) -> int:
    """Set or ask for something of this process. Raises OSError if the kernel refuses; other systems have no prctl."""
    if sys.platform != "linux":
        return 0
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    result = ctypes.CDLL(None, use_errno=True).prctl(option, *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")
    return int(result)


def threads() -> int:
    """Return the number of threads of this process; 1 where the system does not say."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1


def give_back_blocks_from(size: int) -> None:
    """Let freed blocks of `size` bytes or more leave the process, if this is Linux' C library."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a libc that has no such function
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, size)


def limit_growth(most: int) -> None:
    """Let this process take at most so many more bytes of memory; a limit that other systems do not have."""
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        limit = int(status["VmData"].split()[0]) * 1024 + most
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def path_of(descriptor: int) -> str:
    """Return a path by which another process opens a descriptor of this one, on Linux."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def kill_all(find: Callable[[], Iterable[int]]) -> set[int]:
    """Kill the processes that `find` finds, until it finds none. Return those that were killed.

    Each process is stopped at the first look and killed at the second: a stopped process cannot fork in between. One
    that forks and exits while /proc is read can be missed: call this again as long as there may be one.
    """
    stopped: set[int] = set()
    limit = time.monotonic() + KILL_TIME
    any_left = True
    while any_left and time.monotonic() < limit:
        any_left = False
        for pid in find():  # not a list: find() may read /proc again for each
            any_left = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if pid in stopped else signal.SIGSTOP)
            stopped.add(pid)
    return stopped


def memory(pid: int) -> int:
    """Return the bytes of memory of a process: anonymous, shared or swapped out, and not what it reads from files.

    Returns 0 for a process that is gone, and where there is no /proc. Every user may read it, of a confined rank too.
    """
    with contextlib.suppress(OSError):
        rows = (row.partition(":") for row in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(size.split()[0]) << 10 for name, _, size in rows if name in ("RssAnon", "RssShmem", "VmSwap"))
    return 0


def descendants(ancestor: int, known: set[int]) -> set[int]:
    """Return all live descendants of `ancestor`. Where there is no /proc nobody can list them: then those `known`."""
    if not os.path.isdir("/proc/self"):
        return known
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(name))
    processes: set[int] = set()
    stack = [ancestor]
    while stack:
        below = children.get(stack.pop(), [])
        processes.update(below)
        stack.extend(below)
    return processes
