"""Bytes sent per worker and step, bytes stored and bytes needed at the peak, for every strategy.

    python -m benchmark.accounting --workers 1,2,4 --model gpt2-24m          persistent bytes, payload
    python -m benchmark.accounting --workers 2,4 --model gpt2-24m --emulated    beside it the interface's counters

Payload is what the algorithms of the recorded collectives send (payload.py), the interface is eth0 of emulated nodes
(cluster/emulate.py), where there is no other traffic. The first steps, with DDP's first broadcast, are not counted.
A third reference is the payload in units of (N-1)/N of all parameters: 2 for an all_reduce of all gradients.
"""

import argparse
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.measure.machine import environment, interface_bytes, machine_line
from benchmark.measure.memory import counted
from benchmark.measure.payload import Payload
from benchmark.names import names_of, numbers_of
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.loop import PERIOD
from benchmark.training.workload import Workload, load_workload
from benchmark.workers import join, make_ready, on_emulated_nodes, reports, start_workers, without
from common.errors import exit_on_input_error
from common.paths import atomic_write
from common.peak_memory import PeakMemory
from common.workers.process_group import Worker, process_group

WARM_UP, MEASURED = 2, 2  # steps


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
    """One strategy's row, on every worker: means over the workers."""
    memory, row = PeakMemory(worker.device), STRATEGIES[settings.strategy]
    model = workload.build(settings, worker.device)
    shapes = [parameter.shape for parameter in model.parameters()]
    engine = row.make(settings, worker, model)
    del model
    batches = worker.batches(workload.batches(settings))
    persistent: dict[str, int] = {}
    memory.start(PERIOD)

    def step() -> None:
        for micro in range(settings.accumulation):
            output = engine.forward(next(batches))
            memory.sample()
            engine.backward(output, last=micro == settings.accumulation - 1)
            memory.sample()
        if not persistent:
            persistent.update(counted(engine))
        engine.step(settings.learning_rate)

    step()
    persistent.clear()  # before its first step an optimizer has no state
    for _ in range(WARM_UP - 1):
        step()
    dist.barrier()
    payload, before = Payload(), transmitted()
    for _ in range(MEASURED):
        step()
    memory.stop()
    dist.barrier()
    after = transmitted()
    sent = payload.of_engine(engine, settings, MEASURED)
    on_wire = None if before is None or after is None else (after - before) / MEASURED
    mine = {"payload": sent["bytes"], "interface": on_wire, "peak": memory.bytes, **persistent}
    everybody: list[Any] = [None] * worker.world_size
    dist.all_gather_object(everybody, mine)
    means = {k: None if mine[k] is None else sum(other[k] for other in everybody) / len(everybody) for k in mine}
    count = sum(shape.numel() for shape in shapes)
    unit = 4 * count * (worker.world_size - 1) / worker.world_size
    return {
        "strategy": settings.strategy,
        "workers": worker.world_size,
        "parameters": count,
        "ideal": row.ideal_bytes(count, worker.world_size),
        "documented": row.documented_bytes(shapes, worker.world_size),
        "counted": mine["total"],  # of the first worker, as `documented`
        "peak": None if memory.bytes is None else max(other["peak"] for other in everybody),
        "by_kind": {name: mine[name] for name in ("parameters", "gradients", "rest")},
        "payload": means["payload"],
        "calls": sent["calls"],
        "units": None if not unit or means["payload"] is None else means["payload"] / unit,
        "interface": means["interface"],
    }


def transmitted() -> int | None:
    """Bytes that this node's interface has sent; None on a machine that is no emulated node."""
    return interface_bytes() if "COS598D_EMULATED" in os.environ else None


def table(rows: list[dict[str, Any]]) -> str:
    """Both accounts; MB are 10^6 bytes."""

    def mb(value: float | None) -> str:
        return "-" if value is None else f"{value / 1e6:.2f}"

    def quotient(left: float | None, right: float | None) -> str:
        return "-" if left is None or not right else f"{left / right:.4f}"

    lines = [
        f"{'workers':>7} {'strategy':<14}| persistent MB: {'ideal':>9}{'documented':>11}{'counted':>9}{'ratio':>8}"
        f" |{'peak MB':>9}"
        f" | sent per step MB: {'payload':>9}{'interface':>10}{'ratio':>8}{'units':>7}{'calls':>7}"
    ]
    for row in rows:
        units = "-" if row["units"] is None else f"{row['units']:.2f}"
        calls = "-" if row["calls"] is None else f"{row['calls']:.0f}"
        lines.append(
            f"{row['workers']:>7} {row['strategy']:<14}|{'':>15}{mb(row['ideal']):>9}{mb(row['documented']):>11}"
            f"{mb(row['counted']):>9}{quotient(row['counted'], row['documented']):>8} |{mb(row['peak']):>9}"
            f" |{'':>18}{mb(row['payload']):>9}"
            f"{mb(row['interface']):>10}{quotient(row['interface'], row['payload']):>8}{units:>7}{calls:>7}"
        )
    return "\n".join(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(workers=None)
    add = parser.add_argument
    add("--workers", dest="counts", default="1,2,4", help="numbers of workers, one after the other (1,2,4)")
    add("--only", default="all", help="strategies, separated by commas (all)")
    add("--emulated", action="store_true", help="each worker on an emulated node, whose interface is read, too")


def main() -> None:
    begin, argv = environment(), sys.argv[1:]
    settings, flags = parse(argv, "accounting", __doc__, add_flags)
    names = names_of("--only", flags.only, STRATEGIES)
    counts = [settings.world_size]
    if flags.start is None:
        work(settings, names)
    else:
        counts = numbers_of("--workers", flags.counts)
        possible = [name for name in names if not why_not(replace(settings, strategy=name))]
        make_ready(settings, possible, flags.emulated)
        words = [word for word in without(argv, "--workers") if word != "--emulated"]
        start = on_emulated_nodes if flags.emulated else start_workers
        for count in counts:
            if code := start("benchmark.accounting", count, words):
                sys.exit(code)
    if reports(settings):
        report(settings, counts, begin)


def report(settings: Settings, counts: list[int], begin: dict) -> None:
    """Print the table and, as the last line, the figures; both are kept in accounting.json."""
    rows = [row for count in counts for row in json.loads((settings.output_dir / f"workers_{count}.json").read_text())]
    print(table(rows), machine_line(begin), sep="\n")
    result = {"rows": rows, "environment": begin}
    with atomic_write(settings.output_dir / "accounting.json") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))


if __name__ == "__main__":
    exit_on_input_error(main)
