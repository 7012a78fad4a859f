"""Things to time that take turns: what slows the machine down for a while slows all of them down alike."""

import time
from collections.abc import Callable, Sequence

import numpy as np

Step = Callable[[], object]
Turn = Callable[[int], Step]  # prepares the step of a round, which is not timed, and returns it


def nothing() -> None:
    """Where nobody has to wait for anybody."""


def take_round(turns: Sequence[Turn], number: int, meet: Step, seed: int = 0) -> list[float]:
    """Let each take its step once, in a random order that is the same on all workers; return their seconds.

    Workers `meet` before and after each step: a step ends when the slowest worker has ended it.
    """
    seconds = [0.0] * len(turns)
    for i in np.random.default_rng((seed, number)).permutation(len(turns)):
        step = turns[i](number)
        meet()
        begin = time.perf_counter()
        step()
        meet()
        seconds[i] = time.perf_counter() - begin
    return seconds
