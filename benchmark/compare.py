"""The comparison table: all strategies resident in the same workers, taking turns, and the table's own error.

    python -m benchmark.compare --workers 2 --model gpt2-tiny --max_steps 20
    python -m benchmark.compare A/comparison.json B/comparison.json     # two machines, or before and after

In each round every strategy takes one step, in a random order that is the same on all workers, with a barrier before
and after each step. With `single`, every worker computes all examples of the step without communication, so the ratio
to it is the inverse of the speed-up.
Before that, each strategy has to show that its gradient is right (benchmark.prove, on a tiny model): a wrong one is
named and not timed, and the exit code is 1. All start from the same weights and see the same examples, so the timed
steps' losses and gradient norms are compared with single's, too.
"again" is a second engine of the strategy that all are compared with, and "metered" a third with the phase timers on:
their ratios, which should be 1, are the error of the table and the cost of measuring.

peak: what a step needs of memory. sent: by one worker in a step. exposed: communication or waiting for another worker
while nothing is computed, in two steps under the profiler after the last round. norm: of the last step's gradient.

Writes comparison.json, comparison.csv and comparison.png to --output_dir. Other flags are those of benchmark.run.
"""

import argparse
import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import numpy as np
import torch
import torch.distributed as dist

from benchmark.arguments import add_cosine, parse
from benchmark.measure.compared import WARM_UP, ComparedStrategy, trace
from benchmark.measure.intervals import interval, ratio, shown
from benchmark.measure.machine import environment, machine_line
from benchmark.measure.ranking import Bar, draw_ranking
from benchmark.measure.turns import take_round
from benchmark.measure.two_results import compare_results
from benchmark.names import is_own, names_of
from benchmark.prove import Engines, prove_all, verdict
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.workload import load_workload, what_is_trained
from benchmark.workers import join, make_ready, reports, start_workers, without
from cluster.guard import threads_per_command
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from common.peak_memory import MB
from common.workers.process_group import Worker, process_group

ENOUGH = 20  # rounds: with fewer, intervals are wide, and their ends depend on single steps
# Of a timed step's norm from single's: rounding adds up over the steps. In fp16 the scaler skips steps at its leisure.
NORM_DEVIATION = {"fp32": 1e-2, "bf16": 0.1}


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
        turns, count = [strategy.turn for strategy in compared], settings.max_steps
        seconds = [take_round(turns, number, settings.seed, dist.barrier) for number in range(count)]
        trace(worker, labels, compared, count)
        losses = torch.tensor(
            [[loss.item() for loss in strategy.losses[:count]] for strategy in compared], device=worker.device
        )
        losses = losses.double()
        dist.all_reduce(losses)  # workers see different shares of a step; single sees all of it on each
        losses /= worker.world_size
        figures: list[Any] = [None] * worker.world_size
        dist.all_gather_object(figures, [strategy.figures for strategy in compared])
        if worker.is_first:
            norms = [
                [None if norm is None else float(norm) for norm in strategy.norms[:count]] for strategy in compared
            ]
            rounds = {"labels": labels, "seconds": seconds, "losses": losses.tolist(), "norms": norms}
            with atomic_write(settings.output_dir / "rounds.json") as file:
                json.dump(rounds | {"figures": figures, "proofs": proofs}, file)


def prove_labels(settings: Settings, worker: Worker, labels: list[str], kind: str) -> list[dict[str, Any]]:
    """The rows of benchmark.prove for these strategies, on every worker. A collective."""
    tiny = replace(settings, batch_size=2)
    if kind != "own":
        tiny = replace(tiny, model=f"{kind}-tiny", tokenizer_name="", data_dir=None, length=32)
    if settings.precision == "fp16":
        tiny = replace(tiny, precision="fp32")  # a step that the gradient scaler skips would count as wrong
    names = dict.fromkeys(label.split()[0] for label in labels if label != "single")
    engines: Engines = {name: (name, STRATEGIES[name].make) for name in names}
    rows: list[Any] = [[proof.row() for proof in prove_all(tiny, worker, engines)]]
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
    """One row for each strategy, by speed; those that are wrong have no times, and come last."""
    seconds, losses = np.array(found["seconds"])[WARM_UP:], np.array(found["losses"])
    labels, norms, rows = found["labels"], found["norms"], []
    wrong = [
        {"strategy": proof["strategy"], "gradient": proof["gradient"], "sentence": proof["sentence"]}
        for proof in found["proofs"]
        if proof["gradient"] != "ok"
    ]
    for column, label in enumerate(labels):
        if reason := fault(settings, losses[column], norms[column], norms[0]):
            wrong.append({"strategy": label, "gradient": reason, "sentence": f"{label}: {reason}"})
            continue
        mean_ratio, low, high = ratio(seconds[:, column], seconds[:, labels.index(base)])
        median, *ends = interval(seconds[:, column] * 1e3)
        row = {
            "strategy": label,
            "gradient": "ok",
            "step_ms": median,
            "step_ms_95": ends,
            "ratio": mean_ratio,
            "ratio_95": [low, high],
            "samples_per_second": settings.examples_per_step / median * 1e3,
            "tokens_per_second": settings.examples_per_step * settings.length / median * 1e3,
            "loss_difference": float(np.abs(losses[column] - losses[0]).max()),
            "last_loss": float(losses[column, -1]),
            "norm": norms[column][-1],
        }
        of_workers = [figures[column] for figures in found["figures"]]
        for name, summary in (("peak_bytes", max), ("sent_bytes", mean), ("exposed_ms", max)):
            values = [figures[name] for figures in of_workers if figures[name] is not None]
            row[name] = summary(values) if values else None
        rows.append(row)
    return sorted(rows, key=lambda row: row["step_ms"]) + wrong


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def labels_of(settings: Settings, only: str, base: str) -> tuple[list[str], list[str]]:
    """The strategies to compare, `single` first, and why others are missing."""
    wanted, missing = [], []
    for name in dict.fromkeys([*names_of("--base", base, STRATEGIES), *names_of("--only", only, STRATEGIES)]):
        reason = "" if name == "single" else why_not(replace(settings, strategy=name))
        if reason:
            missing.append(reason)
        elif name != "single":
            wanted.append(name)
    return ["single", *wanted, f"{base} again", f"{base} metered"], missing


def table(settings: Settings, rows: list[dict], base: str) -> str:
    speed, unit = ("samples_per_second", "examples/s") if is_own(settings.model) else ("tokens_per_second", "tokens/s")
    heads = ("ms per step", f"ratio to {base} [95 %]", unit, "peak MB", "sent MB", "exposed ms", "norm", "loss")
    widths = (12, 26, 11, 9, 9, 11, 9, 10)
    lines = [
        f"{what_is_trained(settings)}, {settings.precision}, "
        f"{settings.max_steps - WARM_UP} rounds after {WARM_UP} of warm-up",
        f"{'strategy':<16}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
        + f"{'from single':>13}  gradient",
    ]  # fmt: skip
    for row in rows:
        if row["gradient"] != "ok":
            lines.append(f"{row['strategy']:<16}{'':<110}  {row['gradient']}")
            continue
        cells = [f"{row['step_ms']:.1f}", shown((row["ratio"], *row["ratio_95"])), f"{row[speed]:.0f}"]
        for name, size, digits in (
            ("peak_bytes", MB, 1), ("sent_bytes", MB, 2), ("exposed_ms", 1, 2), ("norm", 1, 4), ("last_loss", 1, 5),
        ):  # fmt: skip
            cells.append("-" if row[name] is None else f"{row[name] / size:.{digits}f}")
        line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{row['strategy']:<16}{line}{row['loss_difference']:>13.1e}  ok")
    return "\n".join(lines)


def notes_of(settings: Settings, rows: list[dict], base: str, missing: list[str]) -> list[str]:
    """What a reader has to know beside the table."""
    notes = [f"left out: {reason}" for reason in missing]
    if (rounds := settings.max_steps - WARM_UP) < ENOUGH:
        notes.append(f"note: {rounds} rounds are few; --max_steps {ENOUGH + WARM_UP} or more narrows the intervals")
    again = next((row for row in rows if row["strategy"] == f"{base} again" and "ratio" in row), None)
    if again and again["ratio_95"][0] is not None and not again["ratio_95"][0] <= 1 <= again["ratio_95"][1]:
        notes.append(
            f"note: the interval of {base} again does not contain 1: the machine was busy; do not compare times"
        )
    if (count := threads_per_command(settings.world_size)) > 1:
        notes.append(
            f"note: each worker computes with {count} threads, so strategies in the same process can slow each other "
            "down; see docs/benchmark_results.md"
        )
    return notes


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_cosine(parser)
    parser.add_argument("--only", default="all", help="strategies to compare, separated by commas (all)")
    parser.add_argument("--base", default="ddp", help="the one to compare with (ddp)")


def main() -> None:
    begin, argv = environment(), sys.argv[1:]
    if len(argv) == 2 and all(word.endswith(".json") for word in argv):
        print(compare_results(*map(Path, argv)))
        return
    settings, flags = parse(argv, "compare", __doc__, add_flags)
    if settings.max_steps <= WARM_UP:
        raise InputError(f"--max_steps: expected more than the {WARM_UP} rounds of warm-up, got {settings.max_steps}")
    labels, missing = labels_of(settings, flags.only, flags.base)
    if flags.start is None:
        work(settings, labels)
    else:
        make_ready(settings, [label.split()[0] for label in labels])
        if code := start_workers("benchmark.compare", flags.start, without(argv, "--workers")):
            sys.exit(code)
    if reports(settings):
        report(settings, missing, flags.base, begin)


def report(settings: Settings, missing: list[str], base: str, begin: dict) -> None:
    """Print the table and, as the last line, the figures; keep them in files. Exits with 1 for a fault."""
    folder = settings.output_dir
    found = json.loads((folder / "rounds.json").read_text())
    base = base if base in found["labels"] else "single"  # a wrong base is compared with nothing
    rows = evaluate(settings, base, found)
    wrong, machine = verdict(rows), machine_line(begin)
    print(
        "\n".join([table(settings, rows, base), machine, *notes_of(settings, rows, base, missing), wrong or "all ok"])
    )
    result: dict[str, Any] = {"wrong": [row["strategy"] for row in rows if row["gradient"] != "ok"], "rows": rows}
    result |= {"steps_ms": {  # without the warm-up
        label: [1e3 * times[column] for times in found["seconds"][WARM_UP:]]
        for column, label in enumerate(found["labels"])
    }}  # fmt: skip
    result |= {"left_out": missing, "base": base, "environment": begin, "settings": settings.as_json()}
    with atomic_write(folder / "comparison.json") as file:
        json.dump(result, file, indent=1)
    with atomic_write(folder / "comparison.csv") as file:
        file.write(f"# {machine}\n")
        flat = [flattened(row) for row in rows]
        lines = csv.DictWriter(file, list(flat[0]))
        lines.writeheader()
        lines.writerows(flat)
    bars = [Bar(row["strategy"], row["ratio"], *row["ratio_95"]) for row in rows if "ratio" in row]
    title = f"{settings.model}, {settings.world_size} workers"
    draw_ranking(folder / "comparison.png", bars, f"time of a step, over that of {base}", title)
    print(json.dumps(result), flush=True)
    if wrong:
        sys.exit(wrong)


def flattened(row: dict[str, Any]) -> dict[str, Any]:
    """A row for CSV: an interval is two columns."""
    found = {name: value for name, value in row.items() if name != "sentence" and not name.endswith("_95")}
    ends = {
        f"{name}_{end}": row[name][i] for name in row if name.endswith("_95") for i, end in enumerate(("low", "high"))
    }
    return found | ends


if __name__ == "__main__":
    exit_on_input_error(main)
