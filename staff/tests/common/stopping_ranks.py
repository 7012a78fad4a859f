"""Runs that stop, with real processes and gloo: ranks of which one does what a test asks for, and scripts that hang."""

import json
from pathlib import Path

from common.paths import ROOT
from staff.tests.workers import group

# Six iterations of three all_reduces. The first words say what goes wrong, in iteration 3 at the second of them, on
# which rank, and the sizes of the three.
PROGRAM = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
import torch.distributed as dist
from common.arguments import parse_worker_arguments
from common.errors import exit_on_input_error
from common.workers.process_group import process_group


def join(config):
    address = f"tcp://{{config.master_ip}}:{{config.master_port}}"
    dist.init_process_group("gloo", init_method=address, rank=config.rank, world_size=config.world_size)


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)


def endless():
    while True:
        compute(0.05)
        time.sleep(0.2)


WRONG = {{
    "skips": lambda tensor: True,
    "gathers": lambda tensor: dist.gather(tensor),
    "receives": lambda tensor: dist.recv(tensor, 0),
    "fails": lambda tensor: {{}}["labels"],
    "is killed": lambda tensor: os.kill(os.getpid(), signal.SIGKILL),
    "is killed while others sleep": lambda tensor: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda tensor: os.kill(os.getpid(), signal.SIGSTOP),
    "computes": lambda tensor: compute(4),
    "never ends": lambda tensor: endless(),
}}


def main():
    what, at, sizes = sys.argv.pop(1), int(sys.argv.pop(1)), eval(sys.argv.pop(1))
    config = parse_worker_arguments("hello")
    with process_group(config, join) as worker:
        for iteration in range(1, 7):
            for batch in worker.batches([torch.ones(1)]):
                worker.pulse.begin_iteration()
                for number, size in enumerate(sizes):
                    is_there = (iteration, number) == (3, 1)
                    if is_there and worker.rank != at and what.endswith("others sleep"):
                        time.sleep(60)
                    if not (is_there and worker.rank == at and WRONG[what](torch.ones(size))):
                        dist.all_reduce(torch.ones(size))
        print("finished", flush=True)


exit_on_input_error(main)
"""


class StoppedRun:
    """The end of a run: exit codes, what each rank printed, and the report that was kept."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.codes = codes
        self.logs = [(folder / f"log{rank}.txt").read_text() for rank in range(len(codes))]
        kept = folder / "run" / "stopped.json"
        self.report = json.loads(kept.read_text()) if kept.exists() else None
        self.conclusion = self.report["conclusion"] if self.report else ""


def write_program(folder: Path) -> Path:
    (folder / "ranks.py").write_text(PROGRAM)
    return folder / "ranks.py"


def run_ranks(
    folder: Path, what: str, at: int, workers: int = 3, sizes: str = "(3, 5, 7)", hang_seconds=3
) -> StoppedRun:
    """Run to the end; `at` is the rank that does `what`."""
    words = (what, at, sizes, "--hang_seconds", hang_seconds)
    return StoppedRun(folder, group(write_program(folder), workers, folder, *words))


def hang(folder: Path, script: str, change: str, *words: object, workers: int = 1) -> StoppedRun:
    """Run a script of the course after `change`, Python code that makes it wait for ever, until the watch ends it."""
    go_on = (
        f"import runpy, sys\nsys.argv[0] = {str(ROOT / script)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (folder / "hangs.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{change}\n{go_on}")
    return StoppedRun(folder, group(folder / "hangs.py", workers, folder, *words, "--hang_seconds", 3, "--no_cuda"))
