"""Processes of the graders: what they take, and steps that read a hand-in's texts, each in a process of its own.

No bound is below what a rank has for itself, and no child of a child is overlooked. A step is killed at a deadline and
limited in memory, and it never ends the class run.
"""

import os
import re
import signal
from collections.abc import Callable

import pytest

from staff.grade.own_process import Unfinished, limited_memory, run_apart
from staff.sandbox.process_memory import below, bound_mb, pss_mb


def deaf(text: str) -> object:
    """A regular expression that needs longer than anybody waits, in C code, where no signal is heard."""
    return re.fullmatch("(a+)+b", text)


@pytest.mark.parametrize(
    "step, argument, seconds, error, words",
    [
        (deaf, "a" * 60, 0.5, Unfinished, r"stopped after 0\.5 s"),
        (os._exit, 7, 100, Unfinished, "exit code 7"),
        (float, "said by the step", 100, ValueError, "said by the step"),
        (bytes, 3 << 30, 100, MemoryError, None),
    ],
)
def test_a_step_ends_at_its_deadline_with_its_process_with_its_error_or_at_its_limit(
    step, argument, seconds, error, words
):
    with pytest.raises(error, match=words):
        run_apart(step, argument, seconds=seconds)


def test_the_limit_of_memory_ends_with_the_step():
    with limited_memory(50):
        with pytest.raises(MemoryError):
            bytes(200 << 20)
    assert len(bytes(200 << 20)) == 200 << 20


def test_steps_are_run_in_processes_of_one_server():
    processes = {run_apart(os.getpid, seconds=100) for _ in range(3)}

    assert len(processes) == 3 and os.getpid() not in processes
    assert len({run_apart(os.getppid, seconds=100) for _ in range(3)} - {os.getpid()}) == 1


def in_child(do: Callable[[], object]) -> int:
    """A child that does something, says so and waits to be killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        value = do()
        os.write(writing, b"x")
        signal.pause()
        os._exit(value is None)
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
        grandchildren = below(pid)
        assert len(grandchildren) == 1 and grandchildren < below(os.getpid())
        end(*grandchildren)
    finally:
        end(pid)
        os.waitpid(pid, 0)
    assert pid not in below(os.getpid()) and below(pid) == set()
    assert bound_mb(pid) == 0
