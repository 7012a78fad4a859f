"""GPT-2 on one and on two workers: what a second core gains when a step is mostly computation.

    python -m cluster.demo.two_workers [--steps 6]      # also the end of `make demo`

Task 2b's run_gpt2.py runs three times with the same batch per worker: on one worker with one thread, on two workers
with one thread each, and on one worker with all threads. The first is the baseline of the speed-up. Tokens per second
are those of the median step, without the first, which is a warm-up. A run is called disturbed if other programs used
the cores meanwhile.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import statistics
import sys
from dataclasses import dataclass

from cluster.launch import run_silently
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from common.workers.machine import no_cuda_for, own_cores
from common.workers.processor import disturbance, other_programs
from course.next_step import open_in_script

SCRIPT = "task2b_allreduce/run_gpt2.py"
LESSONS = (SCRIPT, "common/data_partition.py")
EXAMPLES, TOKENS = 64, 128  # of one worker's batch: about a second of computation, and a tenth of that to communicate
STEPS = 6


@dataclass(frozen=True)
class Speed:
    """One run: tokens per second of all workers, and what other programs did meanwhile ("" if nothing)."""

    name: str
    tokens_per_second: float
    warning: str


def show_two_workers(steps: int = STEPS) -> None:
    """Measure and print the table, or print which regions it needs first."""
    missing = dict.fromkeys(region for file in LESSONS for region in open_in_script(ROOT, file))
    if missing:
        print(f"--- GPT-2 on two workers: not written yet: {', '.join(missing)}")
        return
    cores = len(own_cores())
    if cores < 2:
        print("--- GPT-2 on two workers: this machine has one core, so two workers cannot be faster than one")
        return
    print(f"--- GPT-2: {steps} steps, {EXAMPLES} examples of {TOKENS} tokens per worker, {cores} cores", flush=True)
    speeds = [
        measure("1 worker, 1 thread", 1, 1, steps),
        measure("2 workers, 1 thread each", 2, 1, steps),
        measure(f"1 worker, {cores} threads", 1, cores, steps),
    ]
    print(table(speeds))


def measure(name: str, workers: int, threads: int, steps: int) -> Speed:
    """Run task 2b's script once."""
    folder = ROOT / "runs" / "demo" / f"gpt2_{workers}_workers_{threads}_threads"
    flags = {
        "world_size": workers, "batch_size": workers * EXAMPLES, "model_max_length": TOKENS,
        "max_steps": steps, "n_epochs": 1, "dropout": 0, "output_dir": folder,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, SCRIPT, *words, "--overwrite_output_dir", *no_cuda_for(2)]
    run_silently(f"{SCRIPT} on {name}", command, threads)
    return speed(name, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(workers)])


def speed(name: str, records: list[dict]) -> Speed:
    """Return the speed of a run from the records of all its workers."""
    seconds = statistics.median(step["seconds"] for step in records[0]["iterations"][1:])
    tokens = records[0]["config"]["batch_size"] * records[0]["config"]["model_max_length"]  # of all workers
    return Speed(name, tokens / seconds, disturbance(other_programs([record["processor"] for record in records])))


def table(speeds: list[Speed]) -> str:
    """Return one line per run, with its speed-up over the first."""
    lines = ["", f"{'GPT-2':<26} {'tokens/s':>9} {'speed-up':>9}"]
    for speed in speeds:
        ratio = speed.tokens_per_second / speeds[0].tokens_per_second
        lines.append(f"{speed.name:<26} {speed.tokens_per_second:9.0f} {ratio:9.2f}   {speed.warning}".rstrip())
    if any(speed.warning for speed in speeds):
        lines.append(
            "Other programs were busy, so these figures do not count; repeat: python -m cluster.demo.two_workers"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.demo.two_workers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run, the first is not counted")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        raise InputError(f"--steps: expected at least 2, because the first is not counted; got {arguments.steps}")
    show_two_workers(arguments.steps)


if __name__ == "__main__":
    exit_on_input_error(main)
