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
import torch
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.cost.calibration import EngineTimes
from benchmark.cost.measuring import compute_parts, transfers
from benchmark.cost.measuring.plan import CalibrationPlan, Turn, read_plan
from benchmark.measure.compared import ComparedStrategy
from benchmark.measure.turns import Turn as TurnOfRound
from benchmark.measure.turns import nothing, take_round
from benchmark.settings import Settings
from benchmark.strategies import why_not
from benchmark.training.workload import Workload, load_workload
from benchmark.workers import join
from common.errors import exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group

ALONE = "alone"  # the label of a step without communication, which every worker takes for itself
WARM_UP = 2  # rounds


def work(plan: CalibrationPlan, settings: Settings, result: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {"transfers": [], "profiles": [], "small": [], "engines": []}
    with process_group(settings, join) as worker:
        for count in plan.workers:
            group = dist.new_group(list(range(count)))  # all workers make it, also those that are not in it
            if worker.rank < count:
                measure(plan, settings, worker, count, group, found)
            worker.pulse.beat()
            dist.barrier()  # the others wait here, and compute nothing meanwhile
        if plan.turns:
            found["engines"] = [asdict(entry) for entry in engines(plan, settings, worker)]
        if worker.is_first:
            with atomic_write(result) as file:
                json.dump(found, file)


def measure(
    plan: CalibrationPlan,
    settings: Settings,
    worker: Worker,
    count: int,
    group: dist.ProcessGroup,
    found: dict[str, list],
) -> None:
    """Measure with `count` workers; adds to `found`."""
    share = plan.seconds / len(plan.workers)
    if plan.sizes and count > 1:
        tables = transfers.measure(plan.link, plan.sizes, share, group, count, worker.rank)
        found["transfers"] += [asdict(table) for table in tables]
    if plan.models:
        found["small"].append(asdict(compute_parts.small_costs(settings, count, group)))
    for model in plan.models:
        here = replace(settings, model=model)
        part = share / len(plan.models)
        times = compute_parts.profiles(here, worker, load_workload(here), plan.batches, group, count, part)
        found["profiles"] += map(asdict, times)


def engines(plan: CalibrationPlan, settings: Settings, worker: Worker) -> list[EngineTimes]:
    """Return the steps of every engine that runs here, in turns with steps without communication.

    Where a worker has several threads, an engine can change how fast its process computes, for good; so there those
    steps are timed before there is an engine, too.
    """
    before: list[dict[int, float]] = [{} for _ in plan.turns]
    if torch.get_num_threads() > 1:
        before = [timed(plan, turn, [], settings, worker)[1] for turn in plan.turns]
    times = []
    for turn, clean in zip(plan.turns, before, strict=True):
        here = replace(settings, model=turn.model)
        ready = [(name, size) for name, size in turn.engines if not why_not(of(here, name.split()[0], size))]
        found, alone = timed(plan, turn, ready, settings, worker)
        for (label, batch), seconds in zip(ready, found, strict=True):
            took = statistics.median(seconds)
            place = (label, turn.model, here.length, batch, worker.world_size)
            times.append(EngineTimes(*place, took, len(seconds), alone, clean))
    return times


def of(settings: Settings, strategy: str, batch: int) -> Settings:
    return replace(settings, strategy=strategy, batch_size=batch)


def timed(
    plan: CalibrationPlan, turn: Turn, ready: list[tuple[str, int]], settings: Settings, worker: Worker
) -> tuple[list[list[float]], dict[int, float]]:
    """Return the seconds of all rounds of these engines, and by batch the median of the turn's steps alone."""
    here = replace(settings, model=turn.model)
    labels = [*((ALONE, batch) for batch in turn.alone), *ready]
    took = rounds(here, worker, load_workload(here), labels, plan.seconds)
    gc.collect()  # engines hold themselves in circles
    count = len(turn.alone)
    return took[count:], dict(zip(turn.alone, map(statistics.median, took[:count]), strict=True))


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
    turns: list[TurnOfRound] = [lambda number: nothing, *(strategy.turn for strategy in compared)]  # only barriers
    found: list[list[float]] = []
    number, last = 0, WARM_UP + 3
    while number < last:
        begin = time.perf_counter()
        found.append(take_round(turns, number, meet=dist.barrier))
        if number == WARM_UP:
            fitting = [max(3, int(seconds / (time.perf_counter() - begin)))]
            dist.broadcast_object_list(fitting, src=0)
            last = WARM_UP + fitting[0]
        number += 1
    took = np.array(found)[WARM_UP:].T
    return (took[1:] - np.median(took[0])).tolist()  # type: ignore[no-any-return]


def resident(label: str, settings: Settings, worker: Worker, workload: Workload) -> ComparedStrategy:
    if label.split()[0] == ALONE:
        return ComparedStrategy("single", replace(settings, world_size=1, rank=0), worker, workload)
    return ComparedStrategy(label, settings, worker, workload)


def main() -> None:
    plan = read_plan(json.loads(Path(sys.argv[1]).read_text()))
    settings, _ = parse([*sys.argv[3:], "--strategy", "ddp"], "calibrate", __doc__)
    work(plan, settings, Path(sys.argv[2]))


if __name__ == "__main__":
    exit_on_input_error(main)
