"""Time whole steps of engines that are resident in the same workers and take turns in random order."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from benchmark.measure.compared import ComparedStrategy
from benchmark.measure.turns import Turn, nothing, take_round
from benchmark.settings import Settings
from benchmark.training.workload import Workload
from common.workers.process_group import Worker

ALONE = "alone"  # the label of a step without communication, which every worker takes for itself
WARM_UP = 2  # rounds


def rounds(
    settings: Settings,
    worker: Worker,
    workload: Workload,
    engines: list[tuple[str, int]],
    seconds: float,
) -> list[list[float]]:
    """Return seconds of each engine's step, round by round, the barriers' own time taken out. A collective.

    engines: label and batch size, see plan.Turn. It takes about `seconds`, but at least three rounds.
    """
    compared = [resident(label, replace(settings, batch_size=batch), worker, workload) for label, batch in engines]

    def only_barriers(number: int) -> Callable[[], None]:
        return nothing

    turns: list[Turn] = [only_barriers, *(strategy.turn for strategy in compared)]
    found: list[list[float]] = []
    number, last = 0, WARM_UP + 3
    while number < last:
        begin = time.perf_counter()
        found.append(take_round(turns, number, meet=dist.barrier))
        if number == WARM_UP:
            last = WARM_UP + agreed_rounds(seconds, time.perf_counter() - begin)
        number += 1
    took = np.array(found)[WARM_UP:].T
    return (took[1:] - np.median(took[0])).tolist()  # type: ignore[no-any-return]


def resident(label: str, settings: Settings, worker: Worker, workload: Workload) -> ComparedStrategy:
    if label.split()[0] == ALONE:
        return ComparedStrategy("single", replace(settings, world_size=1, rank=0), worker, workload)
    return ComparedStrategy(label, settings, worker, workload)


def agreed_rounds(seconds: float, one: float) -> int:
    """Return how many rounds fit, the same on every worker."""
    wanted = [max(3, int(seconds / one))]
    dist.broadcast_object_list(wanted, src=0)
    return wanted[0]
