"""Things to time that take turns: what slows the machine down for a while slows all of them down alike."""

import time
from collections.abc import Callable, Sequence

import numpy as np

Step = Callable[[], object]
Clock = Callable[[], float]
Turn = Callable[[int], Step]  # prepares the step of a round, which is not timed, and returns it


def nothing() -> None:
    """Where nobody has to wait for anybody."""


def take_rounds_alone(
    turns: Sequence[Turn], rounds: int, warm_up: int, seed: int, meet: Step, clock: Clock = time.perf_counter
) -> np.ndarray:
    """Let each take its step once in every round, in an order that is drawn; return their seconds (rounds, turns).

    The order is the same on all workers, which `meet` before and after each step: it ends when the slowest worker has
    ended it. What meeting itself takes is left out: the median of a step that does nothing, after the warm-up.
    """
    turns = [lambda _: nothing, *turns]
    seconds = np.empty((rounds, len(turns)))
    for number in range(rounds):
        for i in np.random.default_rng((seed, number)).permutation(len(turns)):
            step = turns[i](number)
            meet()
            begin = clock()
            step()
            meet()
            seconds[number, i] = clock() - begin
    return seconds[:, 1:] - np.median(seconds[warm_up:, 0])  # type: ignore[no-any-return]
