"""A list of runs: strategies x models x batch sizes x workers, each in processes of its own; then the tables.

    python -m benchmark.sweep --models t5-tiny,gpt2-tiny --strategies zero0,zero2 --batch_sizes 1,2,4,8,16 --workers 1,2
    python -m benchmark.sweep --strategies all --workers 1,2,4 --examples_per_step 16 [-- --precision bf16]

With --batch_sizes every worker has as many examples (weak scaling); with --examples_per_step they are divided among the
workers (strong scaling), and all runs train on the same ones. A worker has the same number of threads in every run; on
CPUs, the row "single all cores" has all of them.

benchmark.prove first proves each strategy on a small model for each number of workers: a wrong one is named and not
timed, and the exit code is 1. Then every launch writes into a folder of its own, in a random order; --repeats makes
several of each. What is there already of the same flags, commit and versions is kept (--retry reruns failures), so an
interrupted sweep continues where it stopped; anything else is refused. Flags after a lone -- go to benchmark.run. At
the end benchmark.tables writes latency.csv, mem.csv, scaling.csv and the figures.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from benchmark.measure.machine import commit, these_versions
from benchmark.measure.output import Json
from benchmark.measure.record import FailedRun, SweepCell, SweepLaunch, read_launch, read_outcome
from benchmark.names import add_strategies, command_parser, models_of, names_of, numbers_of
from benchmark.strategies import STRATEGIES, Label, one_process
from benchmark.tables import write_tables
from common.errors import InputError, exit_on_input_error
from common.flags import add_memory_limit, positive
from common.paths import ROOT, atomic_write
from common.workers.machine import count_gpus, own_cores

LEVELS = "zero0,zero1,zero2,zero2_offload,zero3,zero3_offload"
OOM = ("out of memory", "can't allocate memory", "MemoryError", "bad_alloc", "killed by SIGKILL", "--memory_limit_mb")
SINGLE, ALL_CORES = Label("single"), Label("single", "all cores")
VALIDATION_STEPS = 4  # with --examples_per_step: validation takes so many steps' examples, if there are as many
# Flags of the proof, too.
OF_GRADIENT = ("precision", "compile", "accumulation", "seed", "grid", "bucket_mb", "deepspeed_config")
SWITCHES = ("--no_cuda", "--recompute", "--find_unused_parameters")
Kept = TypeVar("Kept", SweepLaunch, FailedRun)
Proofs = dict[tuple[str, int, str], Json]  # rows of benchmark.prove by small model, workers and strategy


def plan(flags: argparse.Namespace) -> list[SweepCell]:
    """All runs that the flags describe, without repeats. Raises InputError for flags that describe none."""
    labels = [Label(name) for name in names_of("--strategies", flags.strategies, STRATEGIES)]
    models, counts, cells = models_of(flags.models), numbers_of("--workers", flags.workers), []
    batches, examples = numbers_of("--batch_sizes", flags.batch_sizes), flags.examples_per_step
    for model, label, workers in product(models, labels, counts):
        if examples is not None and examples % workers:
            raise InputError(
                f"--examples_per_step: expected a multiple of {workers}, the number of workers; got {examples}; "
                f"use {workers * max(1, examples // workers)}, for example"
            )
        if workers == 1 or one_process not in STRATEGIES[label.strategy].limits:
            cells += [
                SweepCell(label, model, b, workers) for b in (batches if examples is None else [examples // workers])
            ]
    if not cells:
        raise InputError(f"--workers: {flags.strategies} runs on one worker, got {flags.workers}; add 1")
    return cells


class Sweep:
    """Makes the launches of a folder. more: flags of benchmark.run. threads: of a worker, of `cores`."""

    def __init__(self, flags: argparse.Namespace, more: list[str], threads: int, cores: int) -> None:
        self.folder, self.flags, self.more = flags.output_dir.absolute(), flags, more
        self.threads, self.cores, self.versions = threads, cores, {"commit": commit(), **these_versions()}

    def words(self, cell: SweepCell) -> list[str]:
        """The flags of benchmark.run that say what a launch computes."""
        words = ["--strategies", cell.label.strategy, "--model", cell.model, "--batch_size", str(cell.batch_size)]
        words += ["--workers", str(cell.workers), "--max_steps", str(self.flags.steps)]
        if self.flags.memory_limit_mb is not None:
            words += ["--memory_limit_mb", str(self.flags.memory_limit_mb)]
        if self.flags.examples_per_step is not None:  # all validate on the same examples
            words += ["--eval_batches", str(VALIDATION_STEPS * cell.workers)]
        return [*words, *self.more]

    def made_with(self, cell: SweepCell) -> dict[str, str]:
        """What has to be equal for a kept launch to be used again."""
        threads = self.cores if cell.label == ALL_CORES else self.threads
        return {"flags": " ".join(self.words(cell)), "threads": str(threads), **self.versions}

    def is_done(self, cell: SweepCell) -> bool:
        """Whether a launch is there. Raises InputError if it was made with something else: it may not stand beside."""
        place = self.folder / cell.name
        outcome, kept, wanted = read_outcome(place), read_launch(place), self.made_with(cell)
        if outcome is None or (isinstance(outcome, FailedRun) and self.flags.retry):
            return False
        found = {name: kept.made_with.get(name, "unknown") if kept else "unknown" for name in wanted}
        if different := [f"{name} {found[name]}" for name in wanted if found[name] != wanted[name]]:
            advice = "delete the folder, or name another with --output_dir"
            raise InputError(f"{place} holds a run of {', '.join(different)}; {advice}")
        return True

    def prove(self, cells: list[SweepCell]) -> Proofs:
        """Prove the strategies of these cells once for each small model and number of workers."""
        from benchmark import arguments  # here: they load torch, and this command's flags are checked before
        from benchmark.prove import small_model

        # A wrong flag behind -- is said once, not by every run.
        settings, _ = arguments.parse(self.words(cells[0]), add_flags=arguments.add_run_flags)
        words: list[str] = [flag for flag in SWITCHES if flag in self.more]
        for flag in OF_GRADIENT:
            if (value := getattr(settings, flag)) is not None:
                words += [f"--{flag}", "fp32" if value == "fp16" else str(value)]  # fp16's scaler skips steps
        names: dict[tuple[str, int], dict[str, None]] = {}
        for cell in cells:
            if cell.label.strategy != "single":
                names.setdefault((small_model(cell.model, cell.workers), cell.workers), {})[cell.label.strategy] = None
        proofs: Proofs = {}
        for (model, workers), strategies in names.items():
            place = self.folder / f"proof-{Path(model).name}-w{workers}"
            what = ["--strategies", ",".join(strategies), "--model", model, "--workers", str(workers), *words]
            done = run("benchmark.prove", [*what, "--output_dir", str(place), "--overwrite_output_dir"], self.threads)
            if not done.stdout:
                raise InputError(f"benchmark.prove: {cause(done)}")
            rows = json.loads(done.stdout.splitlines()[-1])["rows"]
            proofs |= {(model, workers, row["strategy"]): row for row in rows}
        return proofs

    def launch(self, cell: SweepCell, proof: Json) -> FailedRun | None:
        """Run a cell, unless its strategy is wrong; its record or failure goes to its folder."""
        place, made_with = self.folder / cell.name, self.made_with(cell)
        (place / "failure.json").unlink(missing_ok=True)
        keep(place / "cell.json", SweepLaunch(cell, proof.get("gradient", "not proved"), made_with))
        if proof.get("sentence"):
            (place / "result.json").unlink(missing_ok=True)
            return keep(place / "failure.json", FailedRun("wrong", proof["sentence"]))
        words = [*self.words(cell), "--output_dir", str(place), "--overwrite_output_dir"]
        done = run("benchmark.run", words, int(made_with["threads"]))
        if done.returncode == 0:
            return None
        is_oom = done.returncode in (137, -9) or any(sign in done.stderr for sign in OOM)
        return keep(place / "failure.json", FailedRun("OOM" if is_oom else "error", cause(done)))


def run(module: str, words: list[str], threads: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def cause(done: subprocess.CompletedProcess[str]) -> str:
    """The line of a failed program's output that names the cause."""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    signs = ("--memory_limit_mb", "rror", "failed first")  # the first of these that is there
    return next((line for sign in signs for line in reversed(lines) if sign in line), lines[-1])[:500]


def keep(path: Path, what: Kept) -> Kept:
    with atomic_write(path) as file:
        json.dump(asdict(what), file)
    return what


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's flags, and those of benchmark.run behind a lone --."""
    own, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = command_parser("sweep", __doc__)
    add = parser.add_argument
    add_strategies(parser, LEVELS)
    add("--models", default="gpt2-tiny", help="models, separated by commas (gpt2-tiny)")
    add("--workers", default="2", help="numbers of workers, separated by commas (%(default)s)")
    add("--batch_sizes", default="1,2,4,8,16,32,64,128", help="batch sizes per worker (%(default)s)")
    add("--examples_per_step", type=positive, help="examples that all workers share, instead of --batch_sizes")
    add("--steps", type=positive, default=24, help="steps per run, with 2 of warm-up and 2 that are traced (24)")
    add("--repeats", type=positive, default=1, help="launches of each run: the median, from 3 on an interval (1)")
    add("--seed", type=int, default=1, help="of the order of the launches (1)")
    add("--output_dir", type=Path, default=ROOT / "runs/benchmark/sweep", help="%(default)s")
    add_memory_limit(parser)
    add("--retry", action="store_true", help="rerun failed runs")
    return parser.parse_args(own), more


def main() -> None:
    flags, more = parse(sys.argv[1:])
    cells = plan(flags)
    from benchmark.engines.operators import compile_operators  # here: they load torch, and the flags are checked before
    from benchmark.prove import small_model, verdict

    cores = len(own_cores())
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // max(cell.workers for cell in cells))))
    no_cuda = "--no_cuda" in more
    if threads < cores and (no_cuda or not count_gpus()):
        cells += [replace(cell, label=ALL_CORES) for cell in cells if cell.label == SINGLE]
    sweep = Sweep(flags, more, threads, cores)
    launches = [replace(cell, repeat=repeat) for repeat in range(flags.repeats) for cell in cells]
    random.Random(flags.seed).shuffle(launches)
    todo = [cell for cell in launches if not sweep.is_done(cell)]
    proofs: Proofs = {}
    if todo:
        sweep.folder.mkdir(parents=True, exist_ok=True)  # before a build of minutes
        compile_operators({cell.label.strategy for cell in todo}, no_cuda)
        proofs = sweep.prove(todo)
    bar = tqdm(todo, desc="sweep")
    for cell in bar:
        bar.set_postfix_str(cell.name)
        place = small_model(cell.model, cell.workers), cell.workers, cell.label.strategy
        if failure := sweep.launch(cell, proofs.get(place, {})):
            tqdm.write(f"{cell.name}: {failure.outcome}: {failure.message}", file=sys.stderr)
    result = write_tables(sweep.folder)
    print(json.dumps(result))
    if wrong := verdict(dict.fromkeys(run["message"] for run in result["failures"] if run["outcome"] == "wrong")):
        sys.exit(wrong)


if __name__ == "__main__":
    exit_on_input_error(main)
