"""Steps that read a hand-in's texts: killed at a deadline, limited in memory, and never the end of the class run."""

import os
import re
import time

import pytest

from staff.grade.own_process import Unfinished, limited_memory, run_apart


def deaf(text: str) -> object:
    """A regular expression that needs longer than anybody waits, in C code, where no signal is heard."""
    return re.fullmatch("(a+)+b", text)


def leave() -> None:
    os._exit(7)


def fail() -> None:
    raise ValueError("said by the step")


def test_a_step_that_is_deaf_to_signals_ends_at_its_deadline():
    with pytest.raises(Unfinished, match=r"stopped after 0\.5 s"):
        run_apart(deaf, "a" * 60, seconds=0.5)


def test_a_step_whose_process_dies_says_so_at_once():
    with pytest.raises(Unfinished, match="exit code 7"):
        run_apart(leave, seconds=100)


def test_what_a_step_raises_is_raised():
    with pytest.raises(ValueError, match="said by the step"):
        run_apart(fail, seconds=100)


def test_a_step_returns_its_value_from_another_process():
    assert run_apart(os.getpid, seconds=100) != os.getpid()


def test_a_step_cannot_take_all_memory():
    with pytest.raises(MemoryError):
        run_apart(bytes, 3 << 30, seconds=100)


def test_the_limit_of_memory_ends_with_the_step():
    with limited_memory(50):
        with pytest.raises(MemoryError):
            bytes(200 << 20)
    assert len(bytes(200 << 20)) == 200 << 20


def test_ten_steps_share_one_start():
    begin = time.process_time()

    for _ in range(10):
        run_apart(os.getpid, seconds=100)

    assert time.process_time() - begin < 5
