"""Strategies x models x batch sizes x workers, each in processes of its own; then the tables.

    python -m benchmark.sweep --models t5-tiny,gpt2-tiny --strategies zero0,zero2 --batch_sizes 1,2,4,8,16 --workers 2

Each combination writes a folder with result.json, or with failure.json if it ran out of memory or crashed. What is
there already of the same flags, commit and versions is kept (--retry reruns failures), so an interrupted sweep
continues where it stopped; anything else is refused. Before that, benchmark.prove proves each strategy on a small model
for each number of workers; a wrong one is named and not timed, and the exit code is 1. Flags after a lone "--" go to
benchmark.run. At the end tables.py writes latency.csv, mem.csv, scaling.csv and figures; with --examples_per_step the
table of benchmark.frameworks, which is this command with other defaults.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmark.measure.machine import commit, environment, these_versions
from benchmark.names import command_parser, models_of, names_of, numbers_of
from benchmark.strategies import STRATEGIES, one_process
from benchmark.tables import LEVELS, Proofs, SweepRun, left_in, write_frameworks, write_tables
from common.errors import InputError, exit_on_input_error
from common.flags import add_memory_limit, check_at_least
from common.paths import ROOT, atomic_write

BATCH_SIZES = "1,2,4,8,16,32,64,128"
OOM = ("out of memory", "can't allocate memory", "MemoryError", "bad_alloc", "killed by SIGKILL", "--memory_limit_mb")
LEAST_STEPS, MOST_STEPS = 6, 400
ALL_CORES = "single all cores"  # a row of frameworks; the row `single` has the threads of one of several workers
LENGTH = 64  # tokens, the default of benchmark.run
VALIDATION_STEPS = 4  # with --examples_per_step: validation takes so many steps' examples, if there are as many


def plan(strategies: list[str], models: list[str], batch_sizes: list[int], workers: list[int]) -> list[SweepRun]:
    """All combinations, small batches first: their step times tell how many steps the larger ones need."""
    runs = [SweepRun(s, m, b, w) for m, s, w, b in product(models, strategies, workers, sorted(batch_sizes))]
    return [run for run in runs if run.workers == 1 or one_process not in STRATEGIES[run.strategy].limits]


def steps_for(run: SweepRun, folder: Path, seconds: float) -> int:
    """Steps that take about `seconds`, judged by the run with half the batch; 20 where nothing is known."""
    half = left_in(folder / replace(run, batch_size=run.batch_size // 2, repeat=0).name)
    if not half or "outcome" in half:
        return 20
    return max(LEAST_STEPS, min(MOST_STEPS, int(seconds / (half.get("step_ms", 100.0) * 2 / 1e3))))


def available_bytes(workers: int, no_cuda: bool) -> float:
    """What one worker may use: of the smallest GPU if each worker has one, otherwise its share of this machine."""
    import torch

    from common.workers.machine import count_gpus  # here: the flags are checked before torch is loaded

    gpus = 0 if no_cuda else count_gpus()
    if workers <= gpus:
        return float(min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus)))
    return psutil.virtual_memory().available / workers


def execute(run: SweepRun, folder: Path, steps: int, more: Sequence[str]) -> dict:
    """Run one combination; its result, or {"outcome": "OOM" or "error", "message": ...}. Raises nothing."""
    place = folder / run.name
    command = [sys.executable, "-m", "benchmark.run", "--strategy", run.name_of_strategy, "--model", run.model]
    command += ["--batch_size", str(run.batch_size), "--workers", str(run.workers), "--max_steps", str(steps)]
    command += ["--output_dir", str(place), "--overwrite_output_dir", *more]
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} if run.strategy == ALL_CORES else {}
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | threads)
    if process.returncode == 0:
        return json.loads((place / "result.json").read_text())
    lines = process.stderr.strip().splitlines()
    out_of_memory = process.returncode in (137, -9) or any(sign in process.stderr for sign in OOM)
    signs = ("--memory_limit_mb", "rror", "failed first")  # the first of these that is there names the cause
    causes = next((matching for sign in signs if (matching := [line for line in lines if sign in line])), lines)
    errors = causes or [f"exit code {process.returncode}"]
    failure = {"outcome": "OOM" if out_of_memory else "error", "message": errors[-1][:500]}
    return keep(place / "failure.json", failure)


def keep(path: Path, figures: dict) -> dict:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        json.dump(figures, file)
    return figures


def flags_of(run: SweepRun, arguments: argparse.Namespace, more: list[str]) -> list[str]:
    """The run's flags of benchmark.run. With --examples_per_step, all validate on the same examples."""
    return ["--eval_batches", str(VALIDATION_STEPS * run.workers), *more] if arguments.examples_per_step else more


def command_of(flags: Sequence[str]) -> dict[str, str]:
    """What has to be equal for a kept run to be used again."""
    versions = ", ".join(f"{name} {number}" for name, number in these_versions().items())
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return {"flags": " ".join(flags), "commit": commit(), "versions": versions, "OMP_NUM_THREADS": threads}


def kept_command(place: Path) -> dict[str, str]:
    """Return what command_of() said of the run that is in this folder; empty if that was not kept."""
    file = place / "command.json"
    return json.loads(file.read_text()) if file.exists() else {}


def check_kept(run: SweepRun, folder: Path, steps: int, more: Sequence[str]) -> None:
    """Raises InputError if the folder holds this run with other settings: its figures cannot stand beside others."""
    place = folder / run.name
    outcome, kept = left_in(place), kept_command(place)
    if not outcome:
        return
    different = [
        f"{name} {kept.get(name, 'unknown') or 'none'}"
        for name, value in command_of(more).items() if kept.get(name) != value
    ]  # fmt: skip
    recorded_steps = sum(outcome.get("steps", {}).values())
    if recorded_steps and steps not in (0, recorded_steps):
        different.append(f"{recorded_steps} steps, expected {steps}")
    if different:
        raise InputError(
            f"{place} holds a run of {', '.join(different)}; delete the folder, or name another with --output_dir"
        )


def proof_flags(more: Sequence[str]) -> list[str]:
    """Those of benchmark.run's flags by which the gradient is computed, for benchmark.prove."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("precision", "accumulation", "grid", "bucket_mb", "deepspeed_config", "seed"):
        parser.add_argument(f"--{name}")
    flags = vars(parser.parse_known_args(more)[0])
    words = [word for name, value in flags.items() if value not in (None, "fp16") for word in (f"--{name}", value)]
    return [*words, *(["--no_cuda"] if "--no_cuda" in more else [])]


def prove_runs(runs: list[SweepRun], folder: Path, more: Sequence[str]) -> Proofs:
    """Prove the strategies once for each kind of model and number of workers, unless that was done before."""
    from benchmark.arguments import parse as parse_proof  # here: they load torch, and the flags are checked before
    from benchmark.prove import add_flags, prove_on_workers, small_model

    proofs: Proofs = {}
    for model, workers in dict.fromkeys((run.model, run.workers) for run in runs):
        names = {run.name_of_strategy for run in runs if (run.model, run.workers) == (model, workers)} - {"single"}
        small = small_model(model, workers)
        place = folder / f"proof-{Path(small).name}-w{workers}"
        words = ["--strategy", ",".join(sorted(names)), "--model", small, "--workers", str(workers)]
        words += ["--output_dir", str(place), "--overwrite_output_dir", *proof_flags(more)]
        if names and kept_command(place) != command_of(words):
            keep(place / "rows.json", {"rows": prove_on_workers(words, *parse_proof(words, "prove", None, add_flags))})
            keep(place / "command.json", command_of(words))
        rows = json.loads((place / "rows.json").read_text())["rows"] if names else []
        proofs |= {(model, workers, row["strategy"]): row for row in rows}
    return proofs


def sweep(runs: list[SweepRun], arguments: argparse.Namespace, more: list[str], proofs: Proofs) -> list[str]:
    """Everything that is not there yet; the lines of what went wrong."""
    failures = []
    bar = tqdm(runs, desc="sweep")
    for run in bar:
        bar.set_postfix_str(run.name)
        outcome, wrong = left_in(arguments.output_dir / run.name), proofs.get(run.proof, {}).get("sentence", "")
        if wrong or not outcome or ("outcome" in outcome and arguments.retry):
            (arguments.output_dir / run.name / "failure.json").unlink(missing_ok=True)
            outcome = attempt(run, arguments, flags_of(run, arguments, more), wrong)
        if "outcome" in outcome:
            failures.append(f"{run.name}: {outcome['outcome']}: {outcome['message']}")
            tqdm.write(failures[-1], file=sys.stderr)
    return failures


def attempt(run: SweepRun, arguments: argparse.Namespace, more: list[str], wrong: str) -> dict:
    """Run one combination, unless its strategy is wrong, or it cannot fit."""
    place = arguments.output_dir / run.name
    keep(place / "command.json", command_of(more))
    if wrong:
        (place / "result.json").unlink(missing_ok=True)
        return keep(place / "failure.json", {"outcome": "wrong", "message": wrong})
    if arguments.skip_predicted_oom:
        from benchmark.predicted_memory import peak_bytes  # here: the flags are checked before torch is loaded

        available = (arguments.memory_limit_mb or 0) * 1e6 or available_bytes(run.workers, "--no_cuda" in more)
        length = int(more[more.index("--length") + 1]) if "--length" in more[:-1] else LENGTH
        needed = peak_bytes(run.name_of_strategy, run.model, run.workers, run.batch_size, length)
        if needed > available:
            words = f"predicted: a step needs {needed / 1e9:.2f} GB on a worker, {available / 1e9:.2f} available"
            return keep(place / "failure.json", {"outcome": "OOM", "message": words})
    steps = arguments.steps or steps_for(run, arguments.output_dir, arguments.seconds)
    return execute(run, arguments.output_dir, steps, more)


def parse(
    argv: list[str], command: str = "sweep", about: str | None = __doc__
) -> tuple[Any, list[SweepRun], list[str]]:
    """The flags, the combinations and the flags of benchmark.run; raises InputError before anything is run."""
    own, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = command_parser(command, about)
    add = parser.add_argument
    add("--strategies", default=LEVELS, help="names, or all (%(default)s)")
    add("--models", default="gpt2-tiny", help="models, separated by commas (gpt2-tiny)")
    add("--workers", default="2", help="numbers of workers, separated by commas (%(default)s)")
    add("--batch_sizes", default=BATCH_SIZES, help="batch sizes per worker, separated by commas (%(default)s)")
    add("--examples_per_step", type=int, help="divide so many examples among the workers, instead of --batch_sizes")
    add("--steps", type=int, default=0, help="steps per run, including 2 warm-up and 2 traced steps (0: --seconds)")
    add("--seconds", type=float, default=10.0, help="seconds of measurement per run (10)")
    add("--repeats", type=int, default=1, help="launches of each run: the median, from 3 on an interval (1)")
    add("--seed", type=int, default=1, help="of the order, which is drawn where --steps says how long a run is (1)")
    add("--output_dir", type=Path, default=ROOT / "runs/benchmark/sweep", help="%(default)s")
    add_memory_limit(parser)
    add("--skip_predicted_oom", action="store_true", help="skip runs that cannot fit into memory")
    add("--retry", action="store_true", help="rerun failed runs")
    arguments = parser.parse_args(own)
    arguments.output_dir = arguments.output_dir.absolute()
    if arguments.memory_limit_mb is not None:
        more = ["--memory_limit_mb", str(arguments.memory_limit_mb), *more]
    strategies, models = names_of("--strategies", arguments.strategies, STRATEGIES), models_of(arguments.models)
    workers, examples = numbers_of("--workers", arguments.workers), arguments.examples_per_step
    check_at_least(arguments, 1, "repeats")
    if examples is None:
        return arguments, plan(strategies, models, numbers_of("--batch_sizes", arguments.batch_sizes), workers), more
    check_at_least(arguments, 1, "steps")
    for count in sorted(set(workers)):
        if examples < 1 or examples % count:
            raise InputError(
                f"--examples_per_step: expected a multiple of {count}, the number of workers; got {examples}; "
                f"use {count * max(1, examples // count)}, for example"
            )
    runs = [replace(run, batch_size=examples // run.workers) for run in plan(strategies, models, [1], workers)]
    more_rows = {"ddp": "ddp again", "single": ALL_CORES}  # the table's own error; what the machine can do without any
    again = [replace(run, strategy=more_rows[run.strategy]) for run in runs if run.strategy in more_rows]
    return arguments, runs + again, more


def main(command: str = "sweep", about: str | None = __doc__, defaults: Sequence[str] = ()) -> None:
    arguments, runs, more = parse([*defaults, *sys.argv[1:]], command, about)
    from benchmark.engines.operators import compile_operators  # here: they load torch, and the flags are checked before
    from benchmark.prove import verdict

    begin, folder = environment(), arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.examples_per_step:
        from benchmark.arguments import parse as parse_run

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        parse_run(["--strategy", "single", *more])  # a mistake is said once, not by every run
    launches = [replace(run, repeat=repeat) for repeat in range(arguments.repeats) for run in runs]
    if arguments.steps:  # otherwise the runs with small batches tell how many steps the others need
        random.Random(arguments.seed).shuffle(launches)
    for run in launches:
        if not (arguments.retry and "outcome" in left_in(folder / run.name)):
            check_kept(run, folder, arguments.steps, flags_of(run, arguments, more))
    compile_operators([run.name_of_strategy for run in runs], "--no_cuda" in more)
    proofs = prove_runs(runs, folder, more)
    failures = sweep(launches, arguments, more, proofs)
    if arguments.examples_per_step:
        result = {"left_out": failures, **write_frameworks(folder, runs, failures, begin, proofs)}
    else:
        result = {"runs": len(runs), "failures": failures, **write_tables(folder)}
    for reason in dict.fromkeys(row["left_out"] for row in proofs.values() if row["left_out"]):
        print(f"not proved: {reason}", file=sys.stderr)
    wrong = {row["sentence"]: row for row in proofs.values() if row["sentence"]}
    print(json.dumps({**result, "wrong": {row["strategy"]: row["gradient"] for row in wrong.values()}}))
    if wrong:
        sys.exit(verdict(list(wrong.values())))


if __name__ == "__main__":
    exit_on_input_error(main)
