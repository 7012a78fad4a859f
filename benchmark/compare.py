"""The comparison table: all strategies resident in the same workers, taking turns, and the table's own error.

    python -m benchmark.compare --workers 2 --model gpt2-tiny --max_steps 20
    python -m benchmark.compare A/comparison.json B/comparison.json     # two machines, or before and after

In each round every strategy takes one step, in a random order that is the same on all workers, with a barrier before
and after each step, whose own time is taken out. `single` is the first worker alone, which computes all examples of the
step on its share of the cores, while the others wait: the ratio to it is the inverse of the speed-up over one worker.
benchmark.frameworks has `single all cores`, too.
Before that, each strategy has to show that its gradient is right (benchmark.prove, on a tiny model): a wrong one is
named and not timed, and the exit code is 1. All start from the same weights and see the same examples, so the timed
steps' losses and gradient norms are compared with single's, too.
"again" is a second engine of the strategy that all are compared with, and "metered" a third with the phase timers on:
their ratios, which should be 1, are the error of the table and the cost of measuring.

peak: what a step needs of memory. sent: by one worker in a step, and as which dtypes (gradients + parameters). exposed:
communication or waiting for another worker while nothing is computed, in two steps under the profiler after the last
round. waiting: the part of it until the last worker has come; unknown where they send one by one. norm: of the
last step's gradient. metric: that of a user's own model, or BLEU with --bleu, after the last step.

Writes comparison.json, comparison.csv and comparison.png to --output_dir. Other flags are those of benchmark.run.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import numpy as np
import torch
import torch.distributed as dist

from benchmark.arguments import add_training_flags, parse
from benchmark.measure.compared import WARM_UP, ComparedStrategy, trace
from benchmark.measure.intervals import interval, interval_text, ratio
from benchmark.measure.machine import environment, machine_line
from benchmark.measure.mfu import utilisation
from benchmark.measure.output import MB, cell, publish, text_table, write_csv
from benchmark.measure.ranking import Bar, draw_ranking
from benchmark.measure.turns import take_rounds_alone
from benchmark.measure.two_results import compare_results
from benchmark.names import is_own, names_of
from benchmark.proof.prover import NOT_PROVED
from benchmark.prove import chosen, prove_all, small_model, verdict
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.workload import load_workload, what_is_trained
from benchmark.workers import join, on_workers
from cluster.guard import threads_per_command
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group

ENOUGH = 20  # rounds: with fewer, intervals are wide, and their ends depend on single steps
WIDE = 0.1  # of a ratio: strategies that differ by less cannot be told apart
# Of a timed step's norm from single's: rounding adds up over the steps. In fp16 the scaler skips steps at its leisure.
NORM_DEVIATION = {"fp32": 1e-2, "bf16": 0.1}


def work(settings: Settings, labels: list[str]) -> None:
    """One worker: all strategies in turn; the first worker keeps the figures."""
    with process_group(settings, join) as worker:
        workload = load_workload(settings)
        proofs = prove_labels(settings, worker, labels)
        wrong = [proof["strategy"] for proof in proofs if proof["sentence"]]
        labels = [label for label in labels if label.split()[0] not in wrong]
        compared = []
        for label in labels:
            compared.append(ComparedStrategy(label, settings, worker, workload, alone=label == "single"))
            worker.pulse.beat()
        turns, count = [strategy.turn for strategy in compared], settings.max_steps
        seconds = take_rounds_alone(turns, count, WARM_UP, settings.seed, dist.barrier)
        trace(worker, labels, compared, count)
        for strategy in compared:
            worker.pulse.beat()
            strategy.note_metric(workload)
            dist.barrier()  # the first worker alone computes BLEU: without it, the others would wait for all of them
        losses = torch.tensor(
            [[loss.item() for loss in strategy.losses[:count]] or [0.0] * count for strategy in compared],
            dtype=torch.float64, device=worker.device,
        )  # fmt: skip
        dist.all_reduce(losses)  # workers see different shares of a step; single sees all of it, on the first worker
        losses[1:] /= worker.world_size
        figures: list[Any] = [None] * worker.world_size
        dist.all_gather_object(figures, [strategy.figures for strategy in compared])
        if worker.is_first:
            norms = [
                [None if norm is None else float(norm) for norm in strategy.norms[:count]] for strategy in compared
            ]
            rounds = {"labels": labels, "seconds": seconds.tolist(), "losses": losses.tolist(), "norms": norms}
            with atomic_write(settings.output_dir / "rounds.json") as file:
                json.dump(rounds | {"figures": figures, "proofs": proofs}, file)


def prove_labels(settings: Settings, worker: Worker, labels: list[str]) -> list[dict[str, Any]]:
    """The rows of benchmark.prove for these strategies, on every worker. A collective."""
    small = replace(settings, model=small_model(settings.model, settings.world_size))
    if not is_own(small.model):
        small = replace(small, tokenizer_name="", data_dir=None, length=32)
    if settings.precision == "fp16":
        small = replace(small, precision="fp32")  # a step that the gradient scaler skips would count as wrong
    names = dict.fromkeys(label.split()[0] for label in labels if label != "single")
    engines, left_out = chosen(small, ",".join(names)) if names else ({}, [])
    proofs = prove_all(replace(small, batch_size=2), worker, engines)
    rows: list[Any] = [[proof.row() for proof in [*left_out, *proofs]]]
    dist.broadcast_object_list(rows)
    return rows[0]  # type: ignore[no-any-return]


def fault(settings: Settings, losses: np.ndarray, norms: list[float | None], right: list[float | None]) -> str:
    """What was wrong in the timed steps; empty if nothing was. losses: of each step; right: norms of single."""
    allowed = NORM_DEVIATION.get(settings.precision, math.inf)
    for step, (norm, expected) in enumerate(zip(norms, right, strict=True), 1):
        if norm is not None and expected and allowed < math.inf and not abs(norm / expected - 1) <= allowed:
            return f"norm x {norm / expected:.4f} in step {step}"
    return "" if np.isfinite(losses).all() else "loss is not a number"


def evaluate(settings: Settings, base: str, rounds: dict, begin: dict) -> list[dict]:
    """One row for each strategy, by speed; those that are wrong have no times, and come last."""
    seconds, losses = np.array(rounds["seconds"])[WARM_UP:], np.array(rounds["losses"])
    labels, norms, rows = rounds["labels"], rounds["norms"], []
    gradients = {proof["strategy"]: proof["gradient"] for proof in rounds["proofs"]} | {"single": "ok"}
    wrong = [
        {name: proof[name] for name in ("strategy", "gradient", "sentence")}
        for proof in rounds["proofs"]
        if proof["sentence"]
    ]
    for column, label in enumerate(labels):
        if reason := fault(settings, losses[column], norms[column], norms[0]):
            wrong.append({"strategy": label, "gradient": reason, "sentence": f"{label}: {reason}"})
            continue
        mean_ratio, low, high = ratio(seconds[:, column], seconds[:, labels.index(base)])
        median, *ends = interval(seconds[:, column] * 1e3)
        speed, of_workers = settings.examples_per_step / median * 1e3, [some[column] for some in rounds["figures"]]
        row = {
            "strategy": label,
            "gradient": gradients.get(label.split()[0], NOT_PROVED),
            "step_ms": median,
            "step_ms_95": ends,
            "ratio": mean_ratio,
            "ratio_95": [low, high],
            "samples_per_second": speed,
            "tokens_per_second": speed * settings.length,
            "mfu": utilisation(settings, speed, begin["gpu"]),
            "loss_difference": float(np.abs(losses[column] - losses[0]).max()),
            "last_loss": float(losses[column, -1]),
            "norm": norms[column][-1],
        }
        for name in ("peak_bytes", "sent_bytes", "sent_as", "exposed_ms", "waiting_ms", "metric"):
            values = [figures[name] for figures in of_workers if figures[name] is not None]
            summary = statistics.fmean if name == "sent_bytes" else max
            row[name] = summary(values) if values else None
        rows.append(row)
    return sorted(rows, key=lambda row: row["step_ms"]) + wrong


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
    own = is_own(settings.model)
    columns = {  # heading -> figure, unit, digits; a column that nobody could measure is left out
        "examples/s" if own else "tokens/s": ("samples_per_second" if own else "tokens_per_second", 1, 0),
        "MFU %": ("mfu", 0.01, 1),
        "peak MB": ("peak_bytes", MB, 1),
        "sent MB": ("sent_bytes", MB, 2),
        "sent as": ("sent_as", 1, 0),
        "exposed ms": ("exposed_ms", 1, 2),
        "waiting ms": ("waiting_ms", 1, 2),
        "norm": ("norm", 1, 4),
        "loss": ("last_loss", 1, 5),
        "BLEU" if settings.bleu else "metric": ("metric", 1, 4),
    }
    columns = {head: of for head, of in columns.items() if any(row.get(of[0]) is not None for row in rows)}
    lines = [["strategy", "ms per step", f"ratio to {base} [95 %]", *columns, "from single", "gradient"]]
    for row in rows:
        if "step_ms" not in row:
            lines.append([row["strategy"], *[""] * (len(lines[0]) - 2), row["gradient"]])
            continue
        figures = [cell(row[name], digits, unit) for name, unit, digits in columns.values()]
        times = [f"{row['step_ms']:.1f}", interval_text((row["ratio"], *row["ratio_95"]))]
        lines.append([row["strategy"], *times, *figures, f"{row['loss_difference']:.1e}", row["gradient"]])
    rounds = f"{settings.max_steps - WARM_UP} rounds after {WARM_UP} of warm-up"
    return f"{what_is_trained(settings)}, {settings.precision}, {rounds}\n{text_table(lines)}"


def notes_of(settings: Settings, rows: list[dict], base: str, missing: list[str]) -> list[str]:
    """What a reader has to know beside the table."""
    notes = [f"left out: {reason}" for reason in missing]
    rounds, widest, width = settings.max_steps - WARM_UP, "", 0.0
    for row in rows:
        low, high = row.get("ratio_95", (None, None))
        if low is not None and (high - low) / row["ratio"] > width:
            widest, width = row["strategy"], (high - low) / row["ratio"]
    if rounds < ENOUGH or width > WIDE:
        example = f" (the widest: {widest}, {width:.0%} of its ratio)" if widest else ""
        more = max(ENOUGH, 4 * rounds) + WARM_UP  # four times the rounds halve an interval
        notes.append(f"note: {rounds} rounds are few for these intervals{example}; --max_steps {more} narrows them")
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
    add_training_flags(parser)
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
    names = [label.split()[0] for label in labels]
    if on_workers("benchmark.compare", settings, flags.start, names, partial(work, settings, labels)):
        report(settings, missing, flags.base, begin)


def report(settings: Settings, missing: list[str], base: str, begin: dict) -> None:
    """Print the table and, as the last line, the figures; keep them in files. Exits with 1 for a fault."""
    folder = settings.output_dir
    rounds = json.loads((folder / "rounds.json").read_text())
    base = base if base in rounds["labels"] else "single"  # a wrong base is compared with nothing
    rows = evaluate(settings, base, rounds, begin)
    wrong, machine = verdict(rows), machine_line(begin)
    unproved = [f"not proved: {proof['left_out']}" for proof in rounds["proofs"] if proof["left_out"]]
    ending = wrong or ("nothing is wrong, but not all is proved" if unproved else "all ok")
    notes = [*unproved, *notes_of(settings, rows, base, missing)]
    print(table(settings, rows, base), machine, *notes, ending, sep="\n")
    flat = [flattened(row) for row in rows]
    write_csv(
        folder / "comparison.csv", [list(flat[0]), *([row.get(name) for name in flat[0]] for row in flat)], machine
    )
    bars = [Bar(row["strategy"], row["ratio"], *row["ratio_95"]) for row in rows if "ratio" in row]
    title = f"{settings.model}, {settings.world_size} workers"
    draw_ranking(folder / "comparison.png", bars, f"time of a step, over that of {base}", title)
    steps_ms = {  # without the warm-up
        label: [1e3 * times[column] for times in rounds["seconds"][WARM_UP:]]
        for column, label in enumerate(rounds["labels"])
    }
    names = [row["strategy"] for row in rows if row.get("sentence")]
    result: dict[str, Any] = {"wrong": names, "rows": rows, "steps_ms": steps_ms, "left_out": missing, "base": base}
    publish(result | {"environment": begin, "settings": settings.as_json()}, folder / "comparison.json")
    if wrong:
        sys.exit(wrong)


def flattened(row: dict[str, Any]) -> dict[str, Any]:
    """A row for CSV: an interval is two columns."""
    values = {name: value for name, value in row.items() if name != "sentence" and not name.endswith("_95")}
    ends = {
        f"{name}_{end}": row[name][i] for name in row if name.endswith("_95") for i, end in enumerate(("low", "high"))
    }
    return values | ends


if __name__ == "__main__":
    exit_on_input_error(main)
