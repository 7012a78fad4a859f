"""What both ends know of the ranks' processes: the descriptors each gets, and how to end what they have started."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CONFINE = "COS598D_CONFINE"  # "package.module:function policy": builds the walls of every rank, see inside/zygote.py
KILL_TIME = 5  # seconds a killed process may take to be gone: one that the kernel holds must not hold us
PER_RANK = 4  # descriptors: the connection to the grader, stdout, stderr, stack


def kill_all(find: Callable[[], Iterable[int]]) -> set[int]:
    """Kill the processes that `find` finds, until it finds none. Returns those that were killed.

    Each is stopped when it is first seen and killed at the second look: a stopped process cannot fork behind our back.
    One that forks and exits while /proc is read can be missed: ask again as long as there may be one.
    """
    seen: set[int] = set()
    limit = time.monotonic() + KILL_TIME
    found = True
    while found and time.monotonic() < limit:
        found = False
        for pid in find():
            found = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if pid in seen else signal.SIGSTOP)
            seen.add(pid)
    return seen


def memory(pid: int) -> int:
    """Bytes of memory that belong to a process: anonymous, shared or swapped out, and not what it reads from files.

    0 for a process that is gone, and where there is no /proc. Everybody may read it, also beyond the walls of a rank.
    """
    with contextlib.suppress(OSError):
        rows = (row.partition(":") for row in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(size.split()[0]) << 10 for name, _, size in rows if name in ("RssAnon", "RssShmem", "VmSwap"))
    return 0


def descendants(ancestor: int, without_proc: set[int]) -> set[int]:
    """The living processes below `ancestor`; where there is no /proc, only those that are given."""
    if not os.path.isdir("/proc/self"):
        return without_proc
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    stack = [ancestor]
    while stack:
        below = children.get(stack.pop(), [])
        found.update(below)
        stack.extend(below)
    return found
