"""One worker of benchmark.calibrate: measures what the plan says. Started on this machine, or on emulated nodes.

python -m benchmark.cost.measuring.rank PLAN.json RESULT.json --world_size 2 --local_rank 0 ...
"""

import gc
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.arguments import parse
from benchmark.cost.calibration import EngineTimes
from benchmark.cost.measuring import compute, transfers
from benchmark.cost.measuring import engines as measure_engines
from benchmark.cost.measuring.plan import CalibrationPlan, read_plan
from benchmark.settings import Settings
from benchmark.strategies import why_not
from benchmark.training.workload import load_workload
from benchmark.workers import join
from common.errors import exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group


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
        found["small"].append(asdict(compute.small_costs(settings, count, group)))
    for model in plan.models:
        workload = load_workload(replace(settings, model=model))
        for batch in plan.batches:
            worker.pulse.beat()
            here = replace(settings, model=model, batch_size=batch)
            part = share / (len(plan.models) * len(plan.batches))
            found["profiles"].append(asdict(compute.profile(here, worker, workload, count, part, group)))


def engines(plan: CalibrationPlan, settings: Settings, worker: Worker) -> list[EngineTimes]:
    """Return the steps of every strategy that runs here; of "ddp again" and the like, too."""
    times = []
    for turn in plan.turns:
        here = replace(settings, model=turn.model, batch_size=turn.batch)
        names = [name for name in turn.strategies if not why_not(replace(here, strategy=name.split()[0]))]
        took = measure_engines.rounds(here, worker, load_workload(here), names, plan.seconds, turn.rounds)
        for name, seconds in took.items():
            middle = statistics.median(seconds)
            entry = EngineTimes(name, turn.model, here.length, turn.batch, worker.world_size, middle, len(seconds))
            times.append(entry)
        gc.collect()  # engines hold themselves in circles
    return times


def main() -> None:
    plan = read_plan(json.loads(Path(sys.argv[1]).read_text()))
    settings, _ = parse([*sys.argv[3:], "--strategy", "ddp"], "calibrate", __doc__)
    work(plan, settings, Path(sys.argv[2]))


if __name__ == "__main__":
    exit_on_input_error(main)
