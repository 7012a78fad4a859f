"""Things to time that take turns: what slows the machine down for a while slows all of them down alike."""

import time
from collections.abc import Callable, Sequence

import numpy as np

Step = Callable[[], object]
Clock = Callable[[], float]
Turn = Callable[[int], Step]  # prepares the step of a round, which is not timed, and returns it


def nothing() -> None:
    """Where nobody has to wait for anybody."""


def take_round(
    turns: Sequence[Turn], number: int, seed: int = 0, meet: Step = nothing, clock: Clock = time.perf_counter
) -> list[float]:
    """Let each take its step once, in a random order that is the same on all workers; return their seconds.

    Workers `meet` before and after each step: a step ends when the slowest worker has ended it.
    """
    seconds = [0.0] * len(turns)
    for i in np.random.default_rng((seed, number)).permutation(len(turns)):
        step = turns[i](number)
        meet()
        begin = clock()
        step()
        meet()
        seconds[i] = clock() - begin
    return seconds


def take_rounds_alone(
    turns: Sequence[Turn], rounds: int, warm_up: int, seed: int, meet: Step, clock: Clock = time.perf_counter
) -> np.ndarray:
    """Let each take its step in every round; return their seconds (rounds, turns) without what meeting itself takes.

    That is the median of a step that does nothing, which takes part in the rounds after the warm-up.
    """

    def idle(_: int) -> Step:
        return nothing

    seconds = np.array([take_round([idle, *turns], number, seed, meet, clock) for number in range(rounds)])
    return seconds[:, 1:] - np.median(seconds[warm_up:, 0])  # type: ignore[no-any-return]


def take_rounds(
    steps: Sequence[Step], rounds: int, warm_up: int = 1, meet: Step = nothing, clock: Clock = time.perf_counter
) -> np.ndarray:
    """Let the steps take turns; return their seconds (rounds, steps), those of the warm-up left out."""
    turns: list[Turn] = [lambda _, step=step: step for step in steps]  # type: ignore[misc]
    return np.array([take_round(turns, number, meet=meet, clock=clock) for number in range(warm_up + rounds)])[warm_up:]
