"""The table of all frameworks on 1, 2 and 4 workers: speed-up, throughput, times, validation loss and perplexity.

    python -m benchmark.frameworks                                                  # gpt2-tiny, all strategies
    python -m benchmark.frameworks --models gpt2 --workers 1,2,4,8 -- --precision bf16

Every run takes the same steps over the same examples: --examples_per_step is divided among the workers. So validation
losses must agree, whatever the framework and however many workers, and what differs is time. A worker uses one CPU
thread unless OMP_NUM_THREADS is set; otherwise a single worker would use all cores and look as fast as several.

The runs are those of benchmark.sweep: existing results are skipped. Flags behind a lone -- go to
benchmark.run. Writes frameworks.csv and frameworks.md to --output_dir.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.measure.machine import environment, machine_line
from benchmark.measure.output import cell, write_csv
from benchmark.names import command_parser
from benchmark.sweep import check_kept, parse_runs, plan, sweep
from benchmark.tables import Runs, SweepRun, busy, kept, most_mb
from common.errors import InputError, exit_on_input_error
from common.flags import check_at_least
from common.paths import ROOT, atomic_write

VALIDATION_STEPS = 4  # validation takes so many steps' examples, or as many as there are
SAME = 1e-4  # validation losses in fp32 that differ by more are not of the same training
Row = dict[str, Any]


def row_of(run: SweepRun, results: Runs) -> Row:
    """A run's figures, and its throughput over that of one worker; None for what was not measured.

    Times are those of all timed steps, sizes those of the worker with the most.
    """
    found, examples = results[run], run.batch_size * run.workers
    speed, steps = found.get("samples_per_second"), found.get("steps", {}).get("timed", 0)
    one, single = (
        results.get(SweepRun(name, run.model, examples, 1), {}).get("samples_per_second")
        for name in (run.strategy, "single")
    )
    communication, exposed = (found.get("communication", {}).get(name) for name in ("total_ms", "exposed_ms"))
    validation = (found.get("evaluations") or [{}])[-1]
    return {
        "model": Path(run.model).name,
        "framework": run.strategy,
        "workers": run.workers,
        "batch_size": run.batch_size,  # of one worker
        "speedup": speed and one and speed / one,  # over the same framework on one worker
        "over_single": speed and single and speed / single,  # over one worker without any framework
        "examples_per_second": speed,
        "slowest": min(found.get("launches", []), default=None),  # examples per second, with --repeats
        "fastest": max(found.get("launches", []), default=None),
        "total_s": found.get("wall_s"),
        "communication_s": communication and communication * steps / 1e3,  # under way, by the traced steps
        "exposed_s": exposed and exposed * steps / 1e3,  # the part of it in which nothing was computed
        "kept_mb": most_mb(found, lambda memory: (memory["persistent_counted"] or {}).get("total")),
        "peak_mb": most_mb(found, lambda memory: memory["peak"]),
        "validation_loss": validation.get("loss"),
        "perplexity": validation.get("perplexity"),
        "bleu": found.get("bleu"),  # with -- --bleu
        **{
            name: found.get("utilisation", {}).get(name) for name in ("gpu_utilisation", "gpu_power", "gpu_temperature")
        },
    }


def combined(launches: list[dict]) -> dict:
    """The launch with the median throughput, and the throughput of all; a failure where all failed."""
    timed = sorted(
        (found for found in launches if "outcome" not in found), key=lambda found: found["samples_per_second"]
    )
    if len(launches) == 1 or not timed:
        return launches[0]
    middle = timed[(len(timed) - 1) // 2]
    return middle | {"launches": [found["samples_per_second"] for found in timed]}


def disagreements(rows: list[Row]) -> list[str]:
    """Frameworks whose validation loss is not that of the first row of the same model."""
    found = []
    for row in rows:
        first = next(other for other in rows if other["model"] == row["model"])
        loss, expected = row["validation_loss"], first["validation_loss"]
        if loss is not None and expected is not None and not abs(loss - expected) <= SAME:  # a NaN is one, too
            found.append(
                f"{row['model']}, {row['framework']}, {row['workers']} workers: validation loss {loss:.6f}, "
                f"but {expected:.6f} with {first['framework']} on {first['workers']}"
            )
    return found


def csv_rows(rows: list[Row], missing: str = "") -> list[list[str]]:
    """The headings and the cells; columns that nobody could measure are left out."""
    heads = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []

    def text(value: object) -> str:
        return cell(value, 4, missing=missing) if value is None or isinstance(value, float) else str(value)

    return [heads, *([text(row[name]) for name in heads] for row in rows)]


def markdown(rows: list[Row]) -> str:
    """The same as a table; a dash stands for what was not measured."""
    head, *body = csv_rows(rows, "-")
    lines = [[name.replace("_", " ") for name in head], ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[SweepRun], list[str]]:
    """The flags as a sweep knows them, the runs and what is handed on; raises InputError before anything is run."""
    parser = command_parser("frameworks", __doc__)
    add = parser.add_argument
    add("--examples_per_step", type=int, default=16, help="of all workers together (16)")
    add("--repeats", type=int, default=1, help="launches of each run, in drawn order: the median and the range (1)")
    add("--seed", type=int, default=1, help="of the order (1)")
    parser.set_defaults(strategies="all", workers="1,2,4", steps=24, output_dir=ROOT / "runs/benchmark/frameworks")
    arguments, more = parse_runs(parser, argv)
    examples = arguments.examples_per_step
    for count in sorted(set(arguments.workers)):
        if examples < 1 or examples % count:
            raise InputError(
                f"--examples_per_step: expected a multiple of {count}, the number of workers; got {examples}; "
                f"use {count * max(1, examples // count)}, for example"
            )
    check_at_least(arguments, 1, "steps", "repeats")
    combinations = plan(arguments.strategies, arguments.models, [1], arguments.workers)
    return arguments, [replace(run, batch_size=examples // run.workers) for run in combinations], more


def validation_flags(model: str, examples: int, workers: int, more: list[str]) -> list[str]:
    """Validation on the same examples for any number of workers: its batches are as large as those of training."""
    from benchmark.arguments import parse as parse_run  # here: it loads torch, and the flags are checked before
    from benchmark.training.workload import load_workload

    settings, _ = parse_run(["--model", model, "--strategy", "single", *more])
    there = len(load_workload(settings).validation) // examples  # type: ignore[arg-type]
    return ["--eval_batches", str(workers * max(1, min(VALIDATION_STEPS, there)))]


def main() -> None:
    arguments, runs, more = parse(sys.argv[1:])
    begin = environment()
    folder, repeats = arguments.output_dir, range(arguments.repeats)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    groups = []
    for model, count in dict.fromkeys((run.model, run.workers) for run in runs):
        some = [run for run in runs if (run.model, run.workers) == (model, count)]
        flags = [*validation_flags(model, some[0].batch_size * count, count, more), *more]
        launches = [replace(run, repeat=repeat) for run in some for repeat in repeats]
        groups.append((random.Random(arguments.seed).sample(launches, len(launches)), flags))
    for some, flags in groups:
        check_kept(some, folder, arguments.steps, flags)
    failures = [line for some, flags in groups for line in sweep(some, arguments, flags)]
    launched = {run: [kept(replace(run, repeat=repeat), folder) for repeat in repeats] for run in runs}
    results = {run: combined(found) for run, found in launched.items()}
    rows = [row_of(run, results) for run in runs if "outcome" not in results[run]]
    machine = machine_line(begin)
    write_csv(folder / "frameworks.csv", csv_rows(rows), machine)
    with atomic_write(folder / "frameworks.md") as file:
        file.write(f"{markdown(rows)}\n\n{machine}\n")
    flagged = disagreements(rows)
    busy_runs = [line for run, launches in launched.items() for found in launches for line in busy(found, run.name)]
    said = [*(f"left out: {line}" for line in failures), *(f"flagged: {line}" for line in [*flagged, *busy_runs])]
    print("\n".join([markdown(rows), "", machine, *said]))
    figures = {"rows": rows, "left_out": failures, "flagged": flagged, "busy": busy_runs, "environment": begin}
    print(json.dumps(figures))


if __name__ == "__main__":
    exit_on_input_error(main)
