"""Not collected by itself: run in the graders' own process by test_sandbox.py."""

import pytest


def test_memory_beyond_the_limit_of_the_graders_is_refused() -> None:
    with pytest.raises(MemoryError):
        bytes(2 << 30)
