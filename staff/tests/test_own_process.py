"""Steps that read a hand-in's texts, each in a process of its own: killed at a deadline, limited in memory, and never
the end of the class run.
"""

import os
import re

import pytest

from staff.grade.own_process import Unfinished, run_apart


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
