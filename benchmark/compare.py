"""The comparison table: all strategies resident in the same workers, taking turns, and the table's own error.

    python -m benchmark.compare --workers 2 --model gpt2-tiny --max_steps 20

In each round every strategy takes one step, in a random order that is the same on all workers, with a barrier before
and after each step. With `single`, every worker computes all examples of the step without communication, so the ratio
to it is the inverse of the speed-up.
Before that, each strategy has to show that its gradient is right (benchmark.prove, on a tiny model): a wrong one is
named and not timed, and the exit code is 1. All start from the same weights and see the same examples, so the timed
steps' losses and gradient norms are compared with single's, too.
"again" is a second engine of the strategy that all are compared with, and "metered" a third with the phase timers on:
their ratios, which should be 1, are the error of the table and the cost of measuring.

--only NAME,NAME limits the strategies; --base NAME sets the one to compare with. Other flags are those of
benchmark.run.
"""

import json
import math
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
from benchmark.prove import prove_all, verdict
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
# Of a timed step's norm from single's: rounding adds up over the steps. In fp16 the scaler skips steps at its leisure.
NORM_DEVIATION = {"fp32": 1e-2, "bf16": 0.1}


class ComparedStrategy:
    """One strategy, ready to take steps."""

    def __init__(self, label: str, settings: Settings, worker: Worker, workload: Workload) -> None:
        strategy = label.split()[0]
        if strategy == "single":
            more = "accumulation" if workload.kind == "t5" else "batch_size"  # T5: the mean of each worker's own mean
            settings = replace(settings, **{more: getattr(settings, more) * settings.world_size}, world_size=1, rank=0)
        self.settings = replace(settings, strategy=strategy)
        self.memory = PeakMemory(worker.device)
        self.engine = STRATEGIES[strategy](self.settings, worker, workload.build(self.settings, worker.device))
        self.batches = worker.batches(workload.batches(self.settings))
        self.meter = Meter(worker) if label.endswith("metered") else None
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor | float | None] = []
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
        self.norms.append(self.engine.norm)


def work(settings: Settings, labels: list[str]) -> None:
    """One worker: all strategies in turn; the first worker keeps the figures."""
    with process_group(settings, join) as worker:
        workload = load_workload(settings)
        proofs = prove_labels(settings, worker, labels, workload.kind)
        wrong = [proof["strategy"] for proof in proofs if proof["gradient"] != "ok"]
        labels = [label for label in labels if label.split()[0] not in wrong]
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
        peaks: list[Any] = [None] * worker.world_size
        dist.all_gather_object(peaks, [strategy.peak for strategy in compared])
        if worker.is_first:
            norms = [[None if norm is None else float(norm) for norm in strategy.norms] for strategy in compared]
            rounds = {"labels": labels, "seconds": seconds.tolist(), "losses": losses.tolist(), "norms": norms}
            with atomic_write(settings.output_dir / "rounds.json") as file:
                json.dump(rounds | {"peaks": peaks, "proofs": proofs}, file)


def prove_labels(settings: Settings, worker: Worker, labels: list[str], kind: str) -> list[dict[str, Any]]:
    """The rows of benchmark.prove for these strategies, on every worker. A collective."""
    tiny = {"model": f"{kind}-tiny", "tokenizer_name": "", "data_dir": None, "batch_size": 2, "length": 32}
    if settings.precision == "fp16":
        tiny["precision"] = "fp32"  # a step that the gradient scaler skips would count as wrong
    names = dict.fromkeys(label.split()[0] for label in labels if label != "single")
    proofs = prove_all(replace(settings, **tiny), worker, {name: (name, STRATEGIES[name]) for name in names})  # type: ignore[arg-type]
    rows: list[Any] = [[proof.row() for proof in proofs]]
    dist.broadcast_object_list(rows)
    return rows[0]  # type: ignore[no-any-return]


def fault(settings: Settings, losses: np.ndarray, norms: list[float | None], right: list[float | None]) -> str:
    """What was wrong in the timed steps; empty if nothing was. losses: of each step; right: norms of single."""
    allowed = NORM_DEVIATION.get(settings.precision, math.inf)
    for step, (norm, expected) in enumerate(zip(norms, right, strict=True), 1):
        if norm and expected and allowed < math.inf and not abs(norm / expected - 1) <= allowed:
            return f"norm x {norm / expected:.4f} in step {step}"
    return "" if np.isfinite(losses).all() else "loss is not a number"


def evaluate(settings: Settings, base: str, found: dict) -> list[dict]:
    """One row for each strategy; those that are wrong have no times."""
    seconds, losses = np.array(found["seconds"])[WARM_UP:], np.array(found["losses"])
    labels, norms = found["labels"], found["norms"]
    rows = [
        {"strategy": proof["strategy"], "gradient": proof["gradient"], "sentence": proof["sentence"]}
        for proof in found["proofs"]
        if proof["gradient"] != "ok"
    ]
    for column, label in enumerate(labels):
        if wrong := fault(settings, losses[column], norms[column], norms[0]):
            rows.append({"strategy": label, "gradient": wrong, "sentence": f"{label}: {wrong}"})
            continue
        mean_ratio, low, high = ratio(seconds[:, column], seconds[:, labels.index(base)])
        median, *_ = interval(seconds[:, column] * 1e3)
        rows.append(
            {
                "strategy": label,
                "gradient": "ok",
                "step_ms": median,
                "ratio": mean_ratio,
                "ratio_95": [low, high],
                "samples_per_second": settings.examples_per_step / median * 1e3,
                "loss_difference": float(np.abs(losses[column] - losses[0]).max()),
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
        f"{'loss':>10}{'differs from single by':>24}{'peak MB':>10}  gradient",
    ]
    for row in rows:
        if row["gradient"] != "ok":
            lines.append(f"{row['strategy']:<16}{'':<96}{row['gradient']}")
            continue
        low, high = row["ratio_95"]
        compared = f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(
            f"{row['strategy']:<16}{row['step_ms']:>12.1f}{row['samples_per_second']:>12.1f}  {compared:<28}"
            f"{row['last_loss']:>10.5f}{row['loss_difference']:>24.1e}"
            f"{'-' if row['peak_bytes'] is None else format(row['peak_bytes'] / MB, '.1f'):>10}  ok"
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
            report(settings, missing, base)
        return
    compile_operators(labels, settings.no_cuda)
    prepare(settings.output_dir)
    if code := start_workers("benchmark.compare", workers, without(argv, "--workers")):
        sys.exit(code)
    report(settings, missing, base)


def report(settings: Settings, missing: list[str], base: str) -> None:
    """Print the table and, as the last line, the figures; keep them in comparison.json. Exits with 1 for a fault."""
    found = json.loads((settings.output_dir / "rounds.json").read_text())
    base = base if base in found["labels"] else "single"  # a wrong base is compared with nothing
    rows = evaluate(settings, base, found)
    wrong = verdict(rows)
    notes = [f"left out: {reason}" for reason in missing]
    if (count := threads_per_command(settings.world_size)) > 1:
        notes.append(
            f"note: each worker computes with {count} threads, so strategies in the same process can slow each other "
            "down; see Measurement error in benchmark/README.md"
        )
    print("\n".join([table(settings, rows, base), *notes, wrong or "all ok"]))
    result: dict[str, Any] = {"wrong": [row["strategy"] for row in rows if row["gradient"] != "ok"], "rows": rows}
    result |= {"left_out": missing, "base": base, "environment": environment()}
    with atomic_write(settings.output_dir / "comparison.json") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result), flush=True)
    if wrong:
        sys.exit(wrong)


if __name__ == "__main__":
    exit_on_input_error(main)
