"""What processes take in memory, and which processes are below one, as /proc tells it.

The exact share of a process (PSS) costs the kernel a walk over its pages, 10 ms for one with torch loaded; a bound of
it costs nothing.
"""

import contextlib
import os
from pathlib import Path

from grader.wire.processes import descendants

MIB = 1 << 20


def pss_mb(pid: int) -> float:
    """A process's share of the memory in MiB: a page that n processes use counts 1/n. Where the kernel does not tell us
    that of another user's or a guarded process, the pages that are certainly its own."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return bound_mb(pid)


def bound_mb(pid: int) -> float:
    """At least what a process has for itself, in MiB; pages that it shares with its parent since the fork count too."""
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / MIB
    return 0.0


def below(pid: int) -> set[int]:
    """The processes below one, without a look at all others of the machine; one that just starts can be missed."""
    processes: set[int] = set()
    stack = [pid]
    while stack:
        try:
            threads = os.listdir(f"/proc/{(parent := stack.pop())}/task")
            texts = [Path(f"/proc/{parent}/task/{thread}/children").read_text() for thread in threads]
        except FileNotFoundError:
            if parent == pid:  # a kernel without this file
                return descendants(pid, set())
            continue
        except OSError:
            continue
        children = {int(child) for text in texts for child in text.split()} - processes
        processes |= children
        stack += children
    return processes
