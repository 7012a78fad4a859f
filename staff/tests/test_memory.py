"""What processes take: the bound is never below what a rank has for itself, and no child of a child is overlooked."""

import os
import signal
from collections.abc import Callable

from staff.sandbox.process_memory import below, bound_mb, pss_mb


def in_child(do: Callable[[], object]) -> int:
    """A child that does something, says so and waits to be killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = do()
        os.write(writing, b"x")
        signal.pause()
        os._exit(kept is None)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return pid


def end(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_the_bound_is_never_below_the_share():
    pid = in_child(lambda: bytes(b"x" * (100 << 20)))
    try:
        assert 100 <= pss_mb(pid) <= bound_mb(pid) + 40  # files that are mapped count in the share only
    finally:
        end(pid)
        os.waitpid(pid, 0)


def test_children_of_children_are_found_and_processes_that_are_gone_are_not():
    pid = in_child(lambda: in_child(lambda: None))
    try:
        found = below(pid)
        assert len(found) == 1 and found < below(os.getpid())
        end(*found)
    finally:
        end(pid)
        os.waitpid(pid, 0)
    assert pid not in below(os.getpid()) and below(pid) == set()
    assert bound_mb(pid) == 0
