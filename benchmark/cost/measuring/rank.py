"""One worker of benchmark.calibrate: measures what the plan says. Started on this machine, or on emulated nodes.

python -m benchmark.cost.measuring.rank PLAN.json RESULT.json --world_size 2 --local_rank 0 ...
"""

import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.cost import calibration as stored
from benchmark.cost.calibration import Calibration, EngineTimes
from benchmark.cost.measuring import compute_parts, transfers
from benchmark.cost.measuring.plan import CalibrationPlan
from benchmark.measure.compared import ComparedStrategy
from benchmark.measure.turns import Turn, nothing, take_round
from benchmark.settings import Settings
from benchmark.strategies import why_not
from benchmark.training.workload import Workload, load_workload
from benchmark.workers import join
from common.errors import exit_on_input_error
from common.workers.process_group import Worker, process_group

WARM_UP, LEAST = 2, 6  # rounds


def work(plan: CalibrationPlan, settings: Settings, result: Path) -> None:
    measured = stored.empty()
    with process_group(settings, join) as worker:
        for count in plan.workers:
            group = dist.new_group(list(range(count)))  # all workers make it, also those that are not in it
            if worker.rank < count:
                measure(plan, settings, worker, count, group, measured)
            worker.pulse.beat()
            dist.barrier()  # the others wait here, and compute nothing meanwhile
        if plan.turns:
            measured.engines.extend(engines(plan, settings, worker))
        if worker.is_first:
            stored.save(measured, result)


def measure(
    plan: CalibrationPlan,
    settings: Settings,
    worker: Worker,
    count: int,
    group: dist.ProcessGroup,
    measured: Calibration,
) -> None:
    """Measure with `count` workers; adds to `measured`."""
    share = plan.seconds / len(plan.workers)
    if plan.sizes and count > 1:
        measured.transfers.extend(transfers.measure(plan.link, plan.sizes, share, group, count, worker.rank))
    if plan.models:
        measured.small.append(compute_parts.small_costs(settings, count, group))
    for model in plan.models:
        here = replace(settings, model=model)
        part = share / len(plan.models)
        measured.profiles.extend(
            compute_parts.profiles(here, worker, load_workload(here), plan.batches, group, count, part)
        )


def engines(plan: CalibrationPlan, settings: Settings, worker: Worker) -> list[EngineTimes]:
    """Return the steps of every engine that runs here. A collective."""
    times = []
    for model, labels in plan.turns:
        here = replace(settings, model=model)
        ready = [
            (label, size)
            for label, size in labels
            if not why_not(replace(here, strategy=label.split()[0], batch_size=size))
        ]
        took = rounds(here, worker, load_workload(here), ready, plan.seconds)
        gc.collect()  # engines hold themselves in circles
        for (label, batch), seconds in zip(ready, took, strict=True):
            place = (label, model, here.length, batch, worker.world_size)
            times.append(EngineTimes(*place, statistics.median(seconds), len(seconds)))
    return times


def rounds(
    settings: Settings,
    worker: Worker,
    workload: Workload,
    engines: list[tuple[str, int]],
    seconds: float,
) -> list[list[float]]:
    """Return seconds of each engine's step, round by round, the barriers' own time taken out. A collective.

    engines: label and batch size, see plan.py. It takes about `seconds`, but at least LEAST rounds.
    """
    compared = [
        ComparedStrategy(label, replace(settings, batch_size=size), worker, workload) for label, size in engines
    ]
    turns: list[Turn] = [lambda number: nothing, *(strategy.turn for strategy in compared)]  # only barriers
    times: list[list[float]] = []
    number, last = 0, WARM_UP + LEAST
    while number < last:
        begin = time.perf_counter()
        times.append(take_round(turns, number, meet=dist.barrier))
        if number == WARM_UP:
            fitting = [max(LEAST, int(seconds / (time.perf_counter() - begin)))]
            dist.broadcast_object_list(fitting, src=0)
            last = WARM_UP + fitting[0]
        number += 1
    took = np.array(times)[WARM_UP:].T
    return (took[1:] - np.median(took[0])).tolist()  # type: ignore[no-any-return]


def main() -> None:
    plan = CalibrationPlan(**json.loads(Path(sys.argv[1]).read_text()))
    settings, _ = parse([*sys.argv[3:], "--strategy", "ddp"], "calibrate", __doc__)
    work(plan, settings, Path(sys.argv[2]))


if __name__ == "__main__":
    exit_on_input_error(main)
