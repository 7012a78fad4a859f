"""Bytes sent per worker and step, bytes stored and bytes needed at the peak, for every strategy.

    python -m benchmark.accounting --workers 1,2,4 --model gpt2-24m          persistent bytes, payload
    python -m benchmark.accounting --workers 2,4 --model gpt2-24m --emulated    beside it the interface's counters

Payload is what the algorithms of the recorded collectives send (payload.py), the interface is eth0 of emulated nodes
(cluster/emulate.py), where there is no other traffic. The first steps, with DDP's first broadcast, are not counted.
A third reference is the payload in units of (N-1)/N of all parameters: 2 for an all_reduce of all gradients. Beside the
peak stands its prediction (predicted_memory.py), which is that of fp32 on CPUs.
"""

import argparse
import gc
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.measure.compared import WARM_UP, ComparedStrategy
from benchmark.measure.machine import environment, interface_bytes, machine_line
from benchmark.measure.memory import counted
from benchmark.measure.output import MB, publish, rows_table
from benchmark.measure.turns import nothing
from benchmark.names import names_of, numbers_of
from benchmark.predicted_memory import predicted_peak
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.workload import Workload, load_workload
from benchmark.workers import join, on_workers
from common.errors import exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group


def work(settings: Settings, names: list[str]) -> None:
    """One worker: each strategy for a few steps, one after the other."""
    with process_group(settings, join) as worker:
        workload = load_workload(settings)
        rows = []
        for name in names:
            if not why_not(replace(settings, strategy=name)):
                worker.pulse.beat()
                rows.append(account(replace(settings, strategy=name), worker, workload))
                gc.collect()  # engines hold themselves in circles
        if worker.is_first:
            with atomic_write(settings.output_dir / f"workers_{worker.world_size}.json") as file:
                json.dump(rows, file)


def account(settings: Settings, worker: Worker, workload: Workload) -> dict[str, Any]:
    """One strategy's row, on every worker: means over the workers. The last round of warm-up counts what is sent."""
    strategy, row = ComparedStrategy(settings.strategy, settings, worker, workload), STRATEGIES[settings.strategy]
    persistent: list[int] = []
    strategy.turn(0)()  # before its first step an optimizer has no state
    strategy.after_backward = lambda: persistent.append(counted(strategy.engine))
    strategy.turn(1)()
    strategy.after_backward = nothing
    step = strategy.turn(WARM_UP - 1)
    dist.barrier()
    before = transmitted()
    step()
    dist.barrier()
    after = transmitted()
    on_wire = None if before is None or after is None else after - before
    figures = {"interface": on_wire, **strategy.figures}
    of_all: list[Any] = [None] * worker.world_size
    dist.all_gather_object(of_all, figures)
    mean, most = (
        {name: None if figures[name] is None else summary(other[name] for other in of_all) for name in figures}
        for summary in (lambda values: sum(values) / worker.world_size, max)
    )
    parameters = sum(shape.numel() for shape in strategy.shapes)
    unit = 4 * parameters * (worker.world_size - 1) / worker.world_size
    return {
        "strategy": settings.strategy,
        "workers": worker.world_size,
        "parameters": parameters,
        "ideal": row.ideal_bytes(parameters, worker.world_size),
        "documented": row.documented_bytes(strategy.shapes, worker.world_size),
        "counted": persistent[0],  # of the first worker, as `documented`
        "peak": most["peak_bytes"],
        "predicted": predicted_peak(settings),
        "payload": mean["sent_bytes"],
        "calls": figures["calls"],
        "units": quotient(mean["sent_bytes"], unit),
        "interface": mean["interface"],
    }


def transmitted() -> int | None:
    """Bytes that this node's interface has sent; None on a machine that is no emulated node."""
    return interface_bytes() if "COS598D_EMULATED" in os.environ else None


def quotient(left: float | None, right: float | None) -> float | None:
    return None if left is None or not right else left / right


def table(rows: list[dict[str, Any]]) -> str:
    """Both accounts: what is kept, and what is sent in a step; MB are 10^6 bytes."""
    return rows_table(
        {
            "strategy": row["strategy"],
            "workers": row["workers"],
            **{f"{name} MB": quotient(row[name], MB) for name in ("ideal", "documented", "counted")},
            "counted / documented": quotient(row["counted"], row["documented"]),
            **{f"{name} MB": quotient(row[name], MB) for name in ("peak", "predicted", "payload", "interface")},
            "interface / payload": quotient(row["interface"], row["payload"]),
            "units": row["units"],
            "calls": row["calls"],
        }
        for row in rows
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(workers=None)
    add = parser.add_argument
    add("--workers", dest="counts", default="1,2,4", help="numbers of workers, one after the other (1,2,4)")
    add("--only", default="all", help="strategies, separated by commas (all)")
    add("--emulated", action="store_true", help="each worker on an emulated node, whose interface is read, too")


def main() -> None:
    begin = environment()
    settings, flags = parse(sys.argv[1:], "accounting", __doc__, add_flags)
    names = names_of("--only", flags.only, STRATEGIES)
    possible = [name for name in names if not why_not(replace(settings, strategy=name))]
    counts = None if flags.start is None else numbers_of("--workers", flags.counts)
    if on_workers("benchmark.accounting", settings, counts, possible, partial(work, settings, names)):
        files = [settings.output_dir / f"workers_{count}.json" for count in counts or [settings.world_size]]
        rows = [row for file in files for row in json.loads(file.read_text())]
        print(table(rows), machine_line(begin), sep="\n")
        publish({"rows": rows, "environment": begin}, settings.output_dir / "accounting.json")


if __name__ == "__main__":
    exit_on_input_error(main)
