"""One worker of benchmark.calibrate: measures what the plan says. Started on this machine, or on emulated nodes.

python -m benchmark.cost.measuring.rank PLAN.json RESULT.json --world_size 2 --local_rank 0 ...
"""

import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.cost.calibration import EngineTimes
from benchmark.cost.measuring import compute_parts, transfers
from benchmark.cost.measuring.plan import CalibrationPlan, read_plan
from benchmark.measure.compared import ComparedStrategy
from benchmark.measure.turns import Turn, nothing, take_round
from benchmark.settings import Settings
from benchmark.strategies import why_not
from benchmark.training.workload import Workload, load_workload
from benchmark.workers import join
from common.errors import exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group

WARM_UP, LEAST = 2, 6  # rounds


def work(plan: CalibrationPlan, settings: Settings, result: Path) -> None:
    measured: dict[str, list[dict[str, Any]]] = {"transfers": [], "profiles": [], "small": [], "engines": []}
    with process_group(settings, join) as worker:
        for count in plan.workers:
            group = dist.new_group(list(range(count)))  # all workers make it, also those that are not in it
            if worker.rank < count:
                measure(plan, settings, worker, count, group, measured)
            worker.pulse.beat()
            dist.barrier()  # the others wait here, and compute nothing meanwhile
        if plan.turns:
            measured["engines"] = [asdict(entry) for entry in engines(plan, settings, worker)]
        if worker.is_first:
            with atomic_write(result) as file:
                json.dump(measured, file)


def measure(
    plan: CalibrationPlan,
    settings: Settings,
    worker: Worker,
    count: int,
    group: dist.ProcessGroup,
    measured: dict[str, list],
) -> None:
    """Measure with `count` workers; adds to `measured`."""
    share = plan.seconds / len(plan.workers)
    if plan.sizes and count > 1:
        tables = transfers.measure(plan.link, plan.sizes, share, group, count, worker.rank)
        measured["transfers"] += [asdict(table) for table in tables]
    if plan.models:
        measured["small"].append(asdict(compute_parts.small_costs(settings, count, group)))
    for model in plan.models:
        here = replace(settings, model=model)
        part = share / len(plan.models)
        times = compute_parts.profiles(here, worker, load_workload(here), plan.batches, group, count, part)
        measured["profiles"] += map(asdict, times)


def engines(plan: CalibrationPlan, settings: Settings, worker: Worker) -> list[EngineTimes]:
    """Return the steps of every engine that runs here. A collective."""
    times = []
    for turn in plan.turns:
        here = replace(settings, model=turn.model)
        ready = [(name, size) for name, size in turn.engines if not why_not(of(here, name.split()[0], size))]
        took = rounds(here, worker, load_workload(here), ready, plan.seconds)
        gc.collect()  # engines hold themselves in circles
        for (label, batch), seconds in zip(ready, took, strict=True):
            place = (label, turn.model, here.length, batch, worker.world_size)
            times.append(EngineTimes(*place, statistics.median(seconds), len(seconds)))
    return times


def of(settings: Settings, strategy: str, batch: int) -> Settings:
    return replace(settings, strategy=strategy, batch_size=batch)


def rounds(
    settings: Settings,
    worker: Worker,
    workload: Workload,
    engines: list[tuple[str, int]],
    seconds: float,
) -> list[list[float]]:
    """Return seconds of each engine's step, round by round, the barriers' own time taken out. A collective.

    engines: label and batch size, see plan.Turn. It takes about `seconds`, but at least LEAST rounds.
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
    plan = read_plan(json.loads(Path(sys.argv[1]).read_text()))
    settings, _ = parse([*sys.argv[3:], "--strategy", "ddp"], "calibrate", __doc__)
    work(plan, settings, Path(sys.argv[2]))


if __name__ == "__main__":
    exit_on_input_error(main)
