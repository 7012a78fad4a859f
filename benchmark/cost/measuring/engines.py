"""Time whole steps of strategies that are resident in the same workers and take turns in random order."""

import time

import numpy as np
import torch.distributed as dist

from benchmark.compare import ComparedStrategy
from benchmark.settings import Settings
from benchmark.training.workload import Workload
from common.workers.process_group import Worker

NOTHING = "nothing"  # a turn that only has the barriers of all others
WARM_UP = 2  # rounds


def rounds(
    settings: Settings, worker: Worker, workload: Workload, labels: list[str], seconds: float, most: int = 10**6
) -> dict[str, list[float]]:
    """Return seconds of each strategy's step, round by round, the barriers' own time taken out. A collective.

    labels: strategies; a second word, as in "ddp again", makes another one of the same. It takes about `seconds`, but
    at least three rounds, at most `most`.
    """
    compared = {label: ComparedStrategy(label, settings, worker, workload) for label in labels}
    everything = [NOTHING, *labels]
    found: dict[str, list[float]] = {label: [] for label in everything}
    number, last = 0, WARM_UP + 3
    while number < min(last, most):
        if number == WARM_UP:
            begin = time.perf_counter()
        for turn in np.random.default_rng(number).permutation(len(everything)):
            worker.pulse.beat()
            label = everything[turn]
            batches = compared[label].next_batches() if label in compared else []
            dist.barrier()
            start = time.perf_counter()
            if label in compared:
                compared[label].step(number, batches)
            dist.barrier()  # a step ends when the slowest worker has ended it
            found[label].append(time.perf_counter() - start)
        if number == WARM_UP:
            last = WARM_UP + agreed_rounds(seconds, time.perf_counter() - begin)
        number += 1
    nothing = float(np.median(found.pop(NOTHING)[WARM_UP:]))
    return {label: [took - nothing for took in times[WARM_UP:]] for label, times in found.items()}


def agreed_rounds(seconds: float, one: float) -> int:
    """Return how many rounds fit, the same on every worker."""
    wanted = [max(3, int(seconds / one))]
    dist.broadcast_object_list(wanted, src=0)
    return wanted[0]
