"""The comparison table: all strategies resident in the same workers, taking turns, and the table's own error.

    python -m benchmark.compare --workers 2 --model gpt2-tiny --max_steps 20

In each round every strategy takes one step, in a random order that is the same on all workers, with a barrier before
and after each step. With `single`, every worker computes all examples of the step without communication, so the ratio
to it is the inverse of the speed-up.
All start from the same weights and see the same examples, so losses and parameters are compared with single's, too.
"again" is a second engine of the strategy that all are compared with, and "metered" a third with the phase timers on:
their ratios, which should be 1, are the error of the table and the cost of measuring.

--only NAME,NAME limits the strategies; --base NAME sets the one to compare with. Other flags are those of
benchmark.run.
"""

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import numpy as np
import torch
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.engines.operators import compile_operators
from benchmark.measure.intervals import interval, ratio
from benchmark.measure.machine import environment
from benchmark.measure.meter import Meter
from benchmark.run import prepare, without
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.loop import PERIOD, rate_at
from benchmark.training.workload import Workload, load_workload
from benchmark.workers import join, reports, start_workers
from cluster.guard import threads_per_command
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from common.peak_memory import MB, PeakMemory, alive_bytes
from common.workers.process_group import Worker, process_group

WARM_UP = 3  # rounds


class ComparedStrategy:
    """One strategy, ready to take steps."""

    def __init__(self, label: str, settings: Settings, worker: Worker, workload: Workload) -> None:
        strategy = label.split()[0]
        if strategy == "single":
            settings = replace(settings, batch_size=settings.batch_size * settings.world_size, world_size=1, rank=0)
        self.settings = replace(settings, strategy=strategy)
        self.memory = PeakMemory(worker.device)
        self.engine = STRATEGIES[strategy](self.settings, worker, workload.build(self.settings, worker.device))
        self.batches = worker.batches(workload.batches(self.settings))
        self.meter = Meter(worker) if label.endswith("metered") else None
        self.losses: list[torch.Tensor] = []
        self.kept = (alive_bytes(worker.device) or 0) - self.memory.before  # what the engine has between its steps
        self.peak: int | None = None

    def next_batches(self) -> list:
        return [next(self.batches) for _ in range(self.settings.accumulation)]

    def step(self, number: int, batches: list) -> None:
        """Take a step; the rounds of warm-up measure its memory as well."""
        if number >= WARM_UP:
            self.take_step(number, batches)
            return
        self.memory.before = (alive_bytes(self.memory.device) or 0) - self.kept  # the other engines' part
        self.memory.start(PERIOD)
        self.take_step(number, batches)
        self.memory.stop()
        self.kept = (alive_bytes(self.memory.device) or 0) - self.memory.before
        self.peak = None if self.memory.bytes is None else max(self.peak or 0, self.memory.bytes)

    def take_step(self, number: int, batches: list) -> None:
        def phase(name: str) -> Any:
            return self.meter.phase(name) if self.meter else nullcontext()

        if self.meter:
            self.meter.begin()
        loss = torch.zeros(())
        for i, batch in enumerate(batches):
            with phase("forward"):
                output = self.engine.forward(batch)
            if number < WARM_UP:
                self.memory.sample()
            with phase("backward"):
                loss = loss + self.engine.backward(output, last=i == len(batches) - 1).cpu() / len(batches)
        with phase("optimizer"):
            self.engine.step(rate_at(self.settings, number))
        if self.meter:
            self.meter.end()
        self.losses.append(loss)


def work(settings: Settings, labels: list[str]) -> None:
    """One worker: all strategies in turn; the first worker keeps the figures."""
    with process_group(settings, join) as worker:
        workload = load_workload(settings)
        compared = []
        for label in labels:
            compared.append(ComparedStrategy(label, settings, worker, workload))
            worker.pulse.beat()
        seconds = np.zeros((settings.max_steps, len(labels)))
        for number in range(settings.max_steps):
            for turn in np.random.default_rng(number).permutation(len(labels)):
                worker.pulse.beat()
                batches = compared[turn].next_batches()
                dist.barrier()
                begin = time.perf_counter()
                compared[turn].step(number, batches)
                dist.barrier()  # a step ends when the slowest worker has ended it
                seconds[number, turn] = time.perf_counter() - begin
        losses = torch.tensor(
            [[loss.item() for loss in strategy.losses] for strategy in compared], device=worker.device
        )
        losses = losses.double()
        dist.all_reduce(losses)  # workers see different shares of a step; single sees all of it on each
        losses /= worker.world_size
        parameters = [strategy.engine.full_parameters() for strategy in compared]  # collectives
        peaks: list[Any] = [None] * worker.world_size
        dist.all_gather_object(peaks, [strategy.peak for strategy in compared])
        if worker.is_first:
            rounds = {"seconds": seconds.tolist(), "losses": losses.tolist(), "peaks": peaks}
            with atomic_write(settings.output_dir / "rounds.json") as file:
                json.dump(rounds | {"distances": [distance(parameters[0], other) for other in parameters]}, file)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter."""
    assert set(left) <= set(right), set(left) ^ set(right)
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left)


def evaluate(settings: Settings, labels: list[str], base: str, found: dict) -> list[dict]:
    """One row for each strategy."""
    seconds, losses = np.array(found["seconds"])[WARM_UP:], np.array(found["losses"])
    rows = []
    for column, label in enumerate(labels):
        mean_ratio, low, high = ratio(seconds[:, column], seconds[:, labels.index(base)])
        median, *_ = interval(seconds[:, column] * 1e3)
        rows.append(
            {
                "strategy": label,
                "step_ms": median,
                "ratio": mean_ratio,
                "ratio_95": [low, high],
                "samples_per_second": settings.examples_per_step / median * 1e3,
                "loss_difference": float(np.abs(losses[column] - losses[0]).max()),
                "parameter_difference": found["distances"][column],
                "last_loss": float(losses[column, -1]),
                "peak_bytes": max((peaks[column] for peaks in found["peaks"] if peaks[column]), default=None),
            }
        )
    return rows


def labels_of(settings: Settings, only: str, base: str) -> tuple[list[str], list[str]]:
    """The strategies to compare, `single` first, and why others are missing."""
    wanted = only.split(",") if only else list(STRATEGIES)
    for name in [*wanted, base]:
        if name not in STRATEGIES:
            raise InputError(f"--only, --base: expected names among {', '.join(STRATEGIES)}; got {name!r}")
    missing = []
    for name in list(wanted):
        reason = "" if name == "single" else why_not(replace(settings, strategy=name))
        if reason:
            wanted.remove(name)
            missing.append(reason)
    names = ["single", *(name for name in dict.fromkeys([base, *wanted]) if name != "single")]
    return [*names, f"{base} again", f"{base} metered"], missing


def table(settings: Settings, rows: list[dict], base: str) -> str:
    lines = [
        f"{settings.model}, {settings.world_size} workers, {settings.batch_size} x {settings.length} tokens each, "
        f"{settings.precision}, {settings.max_steps - WARM_UP} rounds after {WARM_UP} of warm-up",
        f"{'strategy':<16}{'ms per step':>12}{'examples/s':>12}  {'ratio to ' + base + ' [95 %]':<28}"
        f"{'loss':>10}{'differs from single by':>24}{'parameters':>12}{'peak MB':>10}",
    ]
    for row in rows:
        low, high = row["ratio_95"]
        compared = f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(
            f"{row['strategy']:<16}{row['step_ms']:>12.1f}{row['samples_per_second']:>12.1f}  {compared:<28}"
            f"{row['last_loss']:>10.5f}{row['loss_difference']:>24.1e}{row['parameter_difference']:>12.1e}"
            f"{'-' if row['peak_bytes'] is None else format(row['peak_bytes'] / MB, '.1f'):>10}"
        )
    return "\n".join(lines)


def main() -> None:
    argv = sys.argv[1:]
    own = {flag: argv[argv.index(flag) + 1] if flag in argv[:-1] else "" for flag in ("--only", "--base")}
    base = own["--base"] or "ddp"
    rest = without(without(argv, "--only"), "--base")
    settings, workers = parse(rest, "compare", __doc__)
    if settings.max_steps <= WARM_UP:
        raise InputError(f"--max_steps: expected more than the {WARM_UP} rounds of warm-up, got {settings.max_steps}")
    labels, missing = labels_of(settings, own["--only"], base)
    if workers is None:
        work(settings, labels)
        if reports(settings):
            report(settings, labels, missing, base)
        return
    compile_operators(labels, settings.no_cuda)
    prepare(settings.output_dir)
    if code := start_workers("benchmark.compare", workers, without(argv, "--workers")):
        sys.exit(code)
    report(settings, labels, missing, base)


def report(settings: Settings, labels: list[str], missing: list[str], base: str) -> None:
    """Print the table and, as the last line, the figures; both are kept in comparison.json."""
    rows = evaluate(settings, labels, base, json.loads((settings.output_dir / "rounds.json").read_text()))
    notes = [f"left out: {reason}" for reason in missing]
    if (count := threads_per_command(settings.world_size)) > 1:
        notes.append(
            f"note: each worker computes with {count} threads, so strategies in the same process can slow each other "
            "down; see Measurement error in benchmark/README.md"
        )
    print("\n".join([table(settings, rows, base), *notes]))
    result = {"rows": rows, "left_out": missing, "base": base, "environment": environment()}
    with atomic_write(settings.output_dir / "comparison.json") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))


if __name__ == "__main__":
    exit_on_input_error(main)
