"""Bytes sent per worker and step, bytes stored and bytes needed at the peak, for every strategy.

    python -m benchmark.accounting --workers 1,2,4 --model gpt2-24m          persistent bytes, payload
    python -m benchmark.accounting --workers 2,4 --model gpt2-24m --emulated    beside it the interface's counters

Payload is what the algorithms of the recorded collectives send (payload.py), the interface is eth0 of emulated nodes
(cluster/emulate.py), where there is no other traffic. The first steps, with DDP's first broadcast, are not counted.
A third reference is the payload in units of (N-1)/N of all parameters: 2 for an all_reduce of all gradients.
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.engines.engine import Engine
from benchmark.engines.operators import compile_operators
from benchmark.measure.machine import environment
from benchmark.measure.memory import counted, known, textbook
from benchmark.measure.payload import Payload
from benchmark.run import prepare, without
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.loop import PERIOD
from benchmark.training.workload import Workload, load_workload
from benchmark.workers import STARTER_REPORTS, join, reports, start_workers
from cluster.launch import free_port
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, atomic_write
from common.peak_memory import PeakMemory
from common.workers.process_group import Worker, process_group

WARM_UP, MEASURED = 2, 2  # steps
INTERFACE = "eth0"  # of an emulated node


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
    memory = PeakMemory(worker.device)
    model = workload.build(settings, worker.device)
    shapes = [parameter.shape for parameter in model.parameters()]
    engine = STRATEGIES[settings.strategy](settings, worker, model)
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
    sizes = engine.group_sizes()
    sent = payload.since(worker.world_size, settings.backend, MEASURED, sizes) or {"bytes": None, "calls": None}
    payload_bytes = None if sent["bytes"] is None else sent["bytes"] + unrecorded_bytes(engine, settings.backend)
    on_wire = None if before is None or after is None else (after - before) / MEASURED
    mine = {"payload": payload_bytes, "interface": on_wire, "peak": memory.bytes, **persistent}
    everybody: list[Any] = [None] * worker.world_size
    dist.all_gather_object(everybody, mine)
    means = {k: None if mine[k] is None else sum(other[k] for other in everybody) / len(everybody) for k in mine}
    count = sum(shape.numel() for shape in shapes)
    unit = 4 * count * (worker.world_size - 1) / worker.world_size
    return {
        "strategy": settings.strategy,
        "workers": worker.world_size,
        "parameters": count,
        "textbook": textbook(settings.strategy, count, worker.world_size),
        "known": known(settings.strategy, shapes, worker.world_size),
        "counted": mine["total"],  # of the first worker, as `known`
        "peak": None if memory.bytes is None else max(other["peak"] for other in everybody),
        "by_kind": {name: mine[name] for name in ("parameters", "gradients", "rest")},
        "payload": means["payload"],
        "calls": sent["calls"],
        "units": None if not unit or means["payload"] is None else means["payload"] / unit,
        "interface": means["interface"],
    }


def unrecorded_bytes(engine: Engine, backend: str) -> float:
    """Bytes of a step that the flight recorder does not see: it has NCCL's messages from rank to rank, not gloo's."""
    return engine.unrecorded_bytes() if backend == "gloo" else 0.0


def transmitted() -> int | None:
    """Bytes that this node's interface has sent; None on a machine that is no emulated node."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == INTERFACE and "COS598D_EMULATED" in os.environ:
            return int(figures.split()[8])
    return None


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
            f"{row['workers']:>7} {row['strategy']:<14}|{'':>15}{mb(row['textbook']):>9}{mb(row['known']):>11}"
            f"{mb(row['counted']):>9}{quotient(row['counted'], row['known']):>8} |{mb(row['peak']):>9}"
            f" |{'':>18}{mb(row['payload']):>9}"
            f"{mb(row['interface']):>10}{quotient(row['interface'], row['payload']):>8}{units:>7}{calls:>7}"
        )
    return "\n".join(lines)


def main() -> None:
    argv = sys.argv[1:]
    emulated = "--emulated" in argv
    argv = [word for word in argv if word != "--emulated"]
    counts = [1, 2, 4]
    if "--workers" in argv[:-1]:
        wanted = argv[argv.index("--workers") + 1].split(",")
        if not all(word.isdecimal() and int(word) for word in wanted):
            raise InputError(f"--workers: expected numbers such as 1,2,4; got {','.join(wanted)!r}")
        counts = [int(word) for word in wanted]
    names = list(STRATEGIES)
    if "--only" in argv[:-1]:
        names = argv[argv.index("--only") + 1].split(",")
        if unknown := set(names) - set(STRATEGIES):
            raise InputError(f"--only: expected names among {', '.join(STRATEGIES)}; got {', '.join(sorted(unknown))}")
    argv = without(argv, "--workers")
    settings, workers = parse(without(argv, "--only"), "accounting", __doc__)
    if workers is None:
        work(settings, names)
        if reports(settings):
            report(settings, json.loads((settings.output_dir / f"workers_{settings.world_size}.json").read_text()))
        return
    possible = [name for name in names if not why_not(replace(settings, strategy=name))]
    compile_operators(possible, settings.no_cuda or emulated)
    prepare(settings.output_dir)
    rows = []
    for count in counts:
        code = on_emulated_nodes(count, argv) if emulated else start_workers("benchmark.accounting", count, argv)
        if code:
            sys.exit(code)
        rows += json.loads((settings.output_dir / f"workers_{count}.json").read_text())
    report(settings, rows)


def report(settings: Settings, rows: list[dict[str, Any]]) -> None:
    """Print the table and, as the last line, the figures; both are kept in accounting.json."""
    print(table(rows))
    result = {"rows": rows, "environment": environment()}
    with atomic_write(settings.output_dir / "accounting.json") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))


def on_emulated_nodes(count: int, argv: list[str]) -> int:
    """Every worker on a node of its own, links as fast as they can be. The exit code."""
    place = ["--master_ip", "10.10.1.1", "--master_port", str(free_port()), "--world_size", str(count)]
    worker = ["env", "COS598D_EMULATED=1", f"{STARTER_REPORTS}=1", sys.executable]
    worker += ["-m", "benchmark.accounting", *argv, *place]
    command = [sys.executable, "-m", "cluster.emulate", "--nodes", str(count), "--rate", "none", "--", *worker]
    return subprocess.run([*command, "--local_rank", "{rank}"], cwd=ROOT, stdout=sys.stderr).returncode


if __name__ == "__main__":
    exit_on_input_error(main)
