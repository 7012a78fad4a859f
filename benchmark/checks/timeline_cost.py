"""What --timeline costs: nothing in a step without it, and little of a whole run with it.

    python -m benchmark.checks.timeline_cost [--rounds 5] [--task task2b_allreduce] [--workers 4] [--quick]

Off: everything that a Record does in a step, the questions whether there is a timeline included, against a step of the
task: an upper bound. On: whole runs of a task's script with the flag and without, in turns; collecting, drawing and
writing the files included. CPU seconds of all ranks are compared, not wall time: they leave out other programs. Last
line of stdout: {"off": share of a step, "on": median ratio of the runs minus 1, ...}; exit code 0 if off is at most
0.01 and on at most 0.03.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import contextlib
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common.arguments import parse_glue_arguments
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from common.record import Record
from common.workers.process_group import Worker

OFF, ON = 0.01, 0.03
EMPTY_STEPS = 2000


def record_seconds(folder: Path) -> float:
    """CPU seconds that a Record without a timeline takes for a step in which nothing happens."""
    words = ["--max_steps", str(EMPTY_STEPS), "--output_dir", str(folder / "empty"), "--num_train_epochs", "1"]
    record = Record(parse_glue_arguments("task1_single", words), Worker())
    loader = [torch.zeros(1)] * EMPTY_STEPS
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for _ in record.epochs(loader):
            begin = time.process_time()
            for _ in record.iterations(loader):
                for name in ("forward", "backward", "communication", "optimizer"):
                    with record.phase(name):
                        pass
            seconds = time.process_time() - begin
    return seconds / EMPTY_STEPS


def run_seconds(task: str, workers: int, flags: list[str], folder: Path) -> float:
    """CPU seconds of all processes of one run."""
    script = [f"{task}/run_glue.py", "--output_dir", str(folder / "run"), "--overwrite_output_dir", *flags]
    launcher = ["-m", "cluster.launch", "--workers", str(workers), "--"] if workers > 1 else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *launcher, *script], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"{task} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--task", default="task2b_allreduce", help="whose run_glue.py runs (%(default)s)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="smallest sizes; the bounds are not judged")
    arguments = parser.parse_args()
    flags = ["--max_steps", "6", "--do_train"] if arguments.quick else []
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty = record_seconds(folder)
        runs = []
        for number in range(rounds):
            order = (True, False) if number % 2 else (False, True)
            found = {}
            for on in order:
                more = ["--timeline"] if on else []
                found[on] = run_seconds(arguments.task, arguments.workers, [*flags, *more], folder)
            runs.append((found[True], found[False]))
            print(
                f"round {number + 1}: {found[True]:.2f} s of CPU with --timeline, {found[False]:.2f} s without",
                flush=True,
            )
        record = json.loads((folder / "run" / "rank0.json").read_text())
    step = record["seconds_per_iteration"]  # wall time: at least the CPU time of its main thread
    off, extra = empty / step, statistics.median(one / other for one, other in runs) - 1
    print(f"off: at most {empty * 1e6:.1f} us of a step of {step * 1e3:.2f} ms, {off:.2%}")
    print(f"on: {extra:.2%} of a whole run")
    print(json.dumps({"off": off, "on": extra, "rounds": runs, "task": arguments.task, "torch": torch.__version__}))
    sys.exit(not (arguments.quick or (off <= OFF and extra <= ON)))


if __name__ == "__main__":
    exit_on_input_error(main)
