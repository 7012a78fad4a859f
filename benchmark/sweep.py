"""Strategies x models x batch sizes x workers, each in processes of its own; then the tables.

    python -m benchmark.sweep --models t5-tiny,gpt2-tiny --strategies zero0,zero2 --batch_sizes 1,2,4,8,16 --workers 2

Each combination writes a folder with result.json, or with failure.json if it ran out of memory or crashed. Existing
results are skipped (--retry reruns failures), so an interrupted sweep continues where it stopped. Flags after a lone
"--" go to benchmark.run. At the end tables.py writes latency.csv, mem.csv, scaling.csv and figures.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmark.cost.cell import Cell
from benchmark.names import STRATEGIES, check_model
from benchmark.tables import write_tables
from common.errors import InputError, exit_on_input_error
from common.flags import add_memory_limit
from common.paths import ROOT, atomic_write

BATCH_SIZES = "1,2,4,8,16,32,64,128"
OOM = ("out of memory", "can't allocate memory", "MemoryError", "bad_alloc", "killed by SIGKILL", "--memory_limit_mb")
LEAST_STEPS, MOST_STEPS = 6, 400
LENGTH = 64  # tokens, the default of benchmark.run


@dataclass(frozen=True)
class SweepRun:
    """One combination; batch_size is that of one worker."""

    strategy: str
    model: str
    batch_size: int
    workers: int

    @property
    def name(self) -> str:
        return f"{Path(self.model).name}-{self.strategy}-b{self.batch_size}-w{self.workers}"


def plan(strategies: list[str], models: list[str], batch_sizes: list[int], workers: list[int]) -> list[SweepRun]:
    """All combinations, small batches first: their step times tell how many steps the larger ones need."""
    found = [SweepRun(s, m, b, w) for m, s, w, b in product(models, strategies, workers, sorted(batch_sizes))]
    return [run for run in found if run.workers == 1 or run.strategy not in ("single", "dp")]


def steps_for(run: SweepRun, folder: Path, seconds: float) -> int:
    """Steps that take about `seconds`, judged by the run with half the batch; 20 where nothing is known."""
    before = folder / SweepRun(run.strategy, run.model, run.batch_size // 2, run.workers).name / "result.json"
    if not before.exists():
        return 20
    expected = json.loads(before.read_text()).get("step_ms", 100.0) * 2 / 1e3
    return max(LEAST_STEPS, min(MOST_STEPS, int(seconds / expected)))


def predicted_bytes(run: SweepRun, length: int) -> float:
    """What a worker's step needs at its peak, beside its libraries."""
    from benchmark.cost.describe_model import describe  # here: the flags are checked before torch is loaded
    from benchmark.cost.predicted_memory import peak

    return peak(Cell(run.strategy, run.model, run.workers, run.batch_size, length), describe(run.model, length))


def available_bytes(workers: int, no_cuda: bool) -> float:
    """What one worker may use: of the smallest GPU if each worker has one, otherwise its share of this machine."""
    import torch

    from common.workers.gpus import count_gpus  # here: the flags are checked before torch is loaded

    gpus = 0 if no_cuda else count_gpus()
    if workers <= gpus:
        return float(min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus)))
    return psutil.virtual_memory().available / workers


def execute(run: SweepRun, folder: Path, steps: int, more: list[str]) -> dict:
    """SweepRun one combination; its result, or {"outcome": "OOM" or "error", "message": ...}. Raises nothing."""
    place = folder / run.name
    command = [sys.executable, "-m", "benchmark.run", "--strategy", run.strategy, "--model", run.model]
    command += ["--batch_size", str(run.batch_size), "--workers", str(run.workers), "--max_steps", str(steps)]
    command += ["--output_dir", str(place), "--overwrite_output_dir", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads((place / "result.json").read_text())
    said = done.stderr.strip().splitlines()
    out_of_memory = done.returncode in (137, -9) or any(sign in done.stderr for sign in OOM)
    causes = [line for line in said if "rror" in line] or [line for line in said if "failed first" in line]
    errors = causes or said or [f"exit code {done.returncode}"]
    failure = {"outcome": "OOM" if out_of_memory else "error", "message": errors[-1][:500]}
    return keep_failure(place, failure)


def keep_failure(place: Path, failure: dict) -> dict:
    with atomic_write(place / "failure.json") as file:
        json.dump(failure, file)
    return failure


def sweep(runs: list[SweepRun], arguments: argparse.Namespace, more: list[str]) -> list[str]:
    """Everything that is not there yet; the lines of what went wrong."""
    failures = []
    bar = tqdm(runs, desc="sweep")
    for run in bar:
        bar.set_postfix_str(run.name)
        place = arguments.output_dir / run.name
        if (place / "result.json").exists():
            continue
        old = place / "failure.json"
        if old.exists() and not arguments.retry:
            outcome = json.loads(old.read_text())
        else:
            old.unlink(missing_ok=True)
            outcome = attempt(run, arguments, more)
        if "outcome" in outcome:
            failures.append(f"{run.name}: {outcome['outcome']}: {outcome['message']}")
            tqdm.write(failures[-1], file=sys.stderr)
    return failures


def attempt(run: SweepRun, arguments: argparse.Namespace, more: list[str]) -> dict:
    limit = [] if arguments.memory_limit_mb is None else ["--memory_limit_mb", str(arguments.memory_limit_mb)]
    if arguments.skip_predicted_oom:
        available = (arguments.memory_limit_mb or 0) * 1e6 or available_bytes(run.workers, "--no_cuda" in more)
        length = int(more[more.index("--length") + 1]) if "--length" in more[:-1] else LENGTH
        needed = predicted_bytes(run, length)
        if needed > available:
            words = f"predicted: a step needs {needed / 1e9:.2f} GB on a worker, {available / 1e9:.2f} available"
            return keep_failure(arguments.output_dir / run.name, {"outcome": "OOM", "message": words})
    steps = arguments.steps or steps_for(run, arguments.output_dir, arguments.seconds)
    return execute(run, arguments.output_dir, steps, [*limit, *more])


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[SweepRun], list[str]]:
    """The flags, the combinations and what is handed on; raises InputError before anything is run."""
    own, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(prog="python -m benchmark.sweep", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--strategies", default="zero0,zero1,zero2,zero2_offload,zero3,zero3_offload", help="names, or all")
    add("--models", default="gpt2-tiny", help="models, separated by commas (gpt2-tiny)")
    add("--batch_sizes", default=BATCH_SIZES, help=f"batch sizes per worker, separated by commas ({BATCH_SIZES})")
    add("--workers", default="2", help="numbers of workers, separated by commas (2)")
    add("--seconds", type=float, default=10.0, help="seconds of measurement per run (10)")
    add("--steps", type=int, default=0, help="a fixed number of steps instead")
    add_memory_limit(parser)
    add("--skip_predicted_oom", action="store_true", help="skip runs that cannot fit into memory")
    add("--retry", action="store_true", help="rerun failed runs")
    add("--output_dir", type=Path, default=ROOT / "runs" / "benchmark" / "sweep", help="runs/benchmark/sweep")
    arguments = parser.parse_args(own)
    arguments.output_dir = arguments.output_dir.absolute()
    strategies = list(STRATEGIES) if arguments.strategies == "all" else arguments.strategies.split(",")
    for name in strategies:
        if name not in STRATEGIES:
            raise InputError(f"--strategies: expected names among {', '.join(STRATEGIES)}; got {name!r}")
    for name in arguments.models.split(","):
        check_model("--models", name)
    numbers = {}
    for flag in ("batch_sizes", "workers"):
        words = getattr(arguments, flag).split(",")
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise InputError(
                f"--{flag}: expected positive whole numbers, such as 1,2,4; got {getattr(arguments, flag)!r}"
            )
        numbers[flag] = [int(word) for word in words]
    return arguments, plan(strategies, arguments.models.split(","), numbers["batch_sizes"], numbers["workers"]), more


def main() -> None:
    arguments, runs, more = parse(sys.argv[1:])
    os.makedirs(arguments.output_dir, exist_ok=True)
    failures = sweep(runs, arguments, more)
    result = write_tables(arguments.output_dir)
    print(json.dumps({"runs": len(runs), "failures": failures, **result}))


if __name__ == "__main__":
    exit_on_input_error(main)
