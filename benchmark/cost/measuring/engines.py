"""Time whole steps of engines that are resident in the same workers and take turns in random order."""

import time
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from benchmark.compare import ComparedStrategy
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
    found: list[list[float]] = [[] for _ in range(1 + len(engines))]  # the first: a turn that only has the barriers
    number, last = 0, WARM_UP + 3
    while number < last:
        if number == WARM_UP:
            begin = time.perf_counter()
        for turn in np.random.default_rng(number).permutation(len(found)):
            worker.pulse.beat()
            batches = compared[turn - 1].next_batches() if turn else []
            dist.barrier()
            start = time.perf_counter()
            if turn:
                compared[turn - 1].step(number, batches)
            dist.barrier()  # a step ends when the slowest worker has ended it
            found[turn].append(time.perf_counter() - start)
        if number == WARM_UP:
            last = WARM_UP + agreed_rounds(seconds, time.perf_counter() - begin)
        number += 1
    nothing = float(np.median(found[0][WARM_UP:]))
    return [[took - nothing for took in times[WARM_UP:]] for times in found[1:]]


def resident(label: str, settings: Settings, worker: Worker, workload: Workload) -> ComparedStrategy:
    if label.split()[0] == ALONE:
        return ComparedStrategy("single", replace(settings, world_size=1, rank=0), worker, workload)
    return ComparedStrategy(label, settings, worker, workload)


def agreed_rounds(seconds: float, one: float) -> int:
    """Return how many rounds fit, the same on every worker."""
    wanted = [max(3, int(seconds / one))]
    dist.broadcast_object_list(wanted, src=0)
    return wanted[0]
