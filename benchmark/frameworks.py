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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from benchmark.sweep import check_kept, parse_runs, plan, sweep
from benchmark.tables import SweepRun, as_text, busy, kept, most_mb, write_csv
from common.errors import InputError, exit_on_input_error
from common.flags import Parser, check_at_least
from common.paths import ROOT, atomic_write

VALIDATION_STEPS = 4  # validation takes so many steps' examples, or as many as there are
SAME = 1e-4  # validation losses in fp32 that differ by more are not of the same training


@dataclass(frozen=True)
class FrameworkRow:
    """One framework on one number of workers; None for what was not measured. Times are those of the timed steps."""

    model: str
    framework: str
    workers: int
    batch_size: int  # of one worker
    speedup: float | None  # throughput over the same framework's on one worker
    over_single: float | None  # throughput over that of one worker without any framework
    examples_per_second: float | None
    slowest: float | None  # examples per second of the slowest and the fastest launch, with --repeats
    fastest: float | None
    total_s: float | None
    communication_s: float | None  # collectives under way, by the traced steps
    exposed_s: float | None  # the part of it in which nothing was computed
    kept_mb: float | None  # parameters, gradients and optimizer, on the worker with the most
    peak_mb: float | None  # what a step needs, on the worker with the most
    validation_loss: float | None
    perplexity: float | None


def row_of(run: SweepRun, results: dict[SweepRun, dict]) -> FrameworkRow:
    """A run's figures, and its throughput over that of one worker."""
    found = results[run]
    examples = run.batch_size * run.workers
    one = results.get(SweepRun(run.strategy, run.model, examples, 1), {})
    single = results.get(SweepRun("single", run.model, examples, 1), {})
    speed, steps = found.get("samples_per_second"), found.get("steps", {}).get("timed", 0)
    seconds = {name: _scaled(found.get("communication", {}).get(f"{name}_ms"), steps) for name in ("total", "exposed")}
    validation = (found.get("evaluations") or [{}])[-1]
    return FrameworkRow(
        model=Path(run.model).name,
        framework=run.strategy,
        workers=run.workers,
        batch_size=run.batch_size,
        speedup=_over(speed, one.get("samples_per_second")),
        over_single=_over(speed, single.get("samples_per_second")),
        examples_per_second=speed,
        slowest=min(found.get("launches", []), default=None),
        fastest=max(found.get("launches", []), default=None),
        total_s=found.get("wall_s"),
        communication_s=seconds["total"],
        exposed_s=seconds["exposed"],
        kept_mb=most_mb(found, lambda memory: (memory["persistent_counted"] or {}).get("total")),
        peak_mb=most_mb(found, lambda memory: memory["peak"]),
        validation_loss=validation.get("loss"),
        perplexity=validation.get("perplexity"),
    )


def combined(launches: list[dict]) -> dict:
    """The launch with the median throughput, and the throughput of all; a failure where all failed."""
    timed = sorted(
        (found for found in launches if "outcome" not in found), key=lambda found: found["samples_per_second"]
    )
    if len(launches) == 1 or not timed:
        return launches[0]
    middle = timed[(len(timed) - 1) // 2]
    return middle | {"launches": [found["samples_per_second"] for found in timed]}


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def _scaled(milliseconds: float | None, steps: int) -> float | None:
    return None if milliseconds is None else milliseconds * steps / 1e3


def disagreements(rows: list[FrameworkRow]) -> list[str]:
    """Frameworks whose validation loss is not that of the first row of the same model."""
    found = []
    for row in rows:
        first = next(other for other in rows if other.model == row.model)
        if row.validation_loss is None or first.validation_loss is None:
            continue
        if not abs(row.validation_loss - first.validation_loss) <= SAME:  # so that a NaN is one, too
            found.append(
                f"{row.model}, {row.framework}, {row.workers} workers: validation loss {row.validation_loss:.6f}, "
                f"but {first.validation_loss:.6f} with {first.framework} on {first.workers}"
            )
    return found


def csv_rows(rows: list[FrameworkRow]) -> list[list[str]]:
    names = [field.name for field in fields(FrameworkRow)]
    return [names, *([_cell(value) for value in asdict(row).values()] for row in rows)]


def markdown(rows: list[FrameworkRow]) -> str:
    """The same as a table; a dash stands for what was not measured."""
    head, *body = csv_rows(rows)
    lines = [[name.replace("_", " ") for name in head], ["---"] * len(head)]
    lines += [[cell or "-" for cell in line] for line in body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return as_text(value, 4) if value is None or isinstance(value, float) else str(value)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[SweepRun], list[str]]:
    """The flags as a sweep knows them, the runs and what is handed on; raises InputError before anything is run."""
    parser = Parser(prog="python -m benchmark.frameworks", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--strategies", default="all", help="names of benchmark.run's strategies (all)")
    add("--workers", default="1,2,4", help="numbers of workers (1,2,4)")
    add("--examples_per_step", type=int, default=16, help="of all workers together (16)")
    add("--steps", type=int, default=24, help="steps per run, including 2 warm-up and 2 traced steps (24)")
    add("--repeats", type=int, default=1, help="launches of each run, in drawn order: the median and the range (1)")
    add("--seed", type=int, default=1, help="of the order (1)")
    folder = ROOT / "runs" / "benchmark" / "frameworks"
    add("--output_dir", type=Path, default=folder, help="runs/benchmark/frameworks")
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


def write(rows: list[FrameworkRow], folder: Path) -> None:
    write_csv(folder / "frameworks.csv", csv_rows(rows))
    with atomic_write(folder / "frameworks.md") as file:
        file.write(markdown(rows) + "\n")


def main() -> None:
    arguments, runs, more = parse(sys.argv[1:])
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    groups = []
    for model, count in dict.fromkeys((run.model, run.workers) for run in runs):
        some = [run for run in runs if (run.model, run.workers) == (model, count)]
        flags = [*validation_flags(model, some[0].batch_size * count, count, more), *more]
        launches = [replace(run, repeat=repeat) for run in some for repeat in range(arguments.repeats)]
        groups.append((random.Random(arguments.seed).sample(launches, len(launches)), flags))
    for some, flags in groups:
        check_kept(some, arguments.output_dir, arguments.steps, flags)
    failures = [line for some, flags in groups for line in sweep(some, arguments, flags)]
    launched = {
        run: [kept(replace(run, repeat=repeat), arguments.output_dir) for repeat in range(arguments.repeats)]
        for run in runs
    }
    results = {run: combined(found) for run, found in launched.items()}
    rows = [row_of(run, results) for run in runs if "outcome" not in results[run]]
    write(rows, arguments.output_dir)
    flagged = disagreements(rows)
    busy_runs = [line for run, launches in launched.items() for found in launches for line in busy(found, run.name)]
    said = [*(f"left out: {line}" for line in failures), *(f"flagged: {line}" for line in [*flagged, *busy_runs])]
    print("\n".join([markdown(rows), *said]))
    figures = {"rows": [asdict(row) for row in rows], "left_out": failures, "flagged": flagged, "busy": busy_runs}
    print(json.dumps(figures))


if __name__ == "__main__":
    exit_on_input_error(main)
