"""A small run whose ranks do what a test asks for: the program, and how to start it with real processes and gloo.

Six iterations of three all_reduces. `--do` names what goes wrong, in iteration 3 at the second of them.
"""

import json
from pathlib import Path

from common.paths import ROOT
from tests.own.workers import start, wait

PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from common.arguments import parse_worker_arguments
from common.errors import exit_on_input_error
from common.workers.process_group import process_group


def join(config):
    address = f"tcp://{{config.master_ip}}:{{config.master_port}}"
    dist.init_process_group("gloo", init_method=address, rank=config.rank, world_size=config.world_size)


def one_call(wrong, size):
    if wrong == "leaves_out":
        return
    if wrong == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong == "fails":
        raise KeyError("the batch has no labels")
    if wrong == "calls_another":
        return dist.broadcast(torch.ones(size), 0)
    if wrong == "receives":
        dist.recv(torch.ones(size), 0)
    if wrong == "sleeps":
        time.sleep(4)
    if wrong == "computes":
        end = time.monotonic() + 3
        while time.monotonic() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)
    dist.all_reduce(torch.ones(size))


def main():
    what, at, sizes = sys.argv.pop(1), int(sys.argv.pop(1)), eval(sys.argv.pop(1))
    config = parse_worker_arguments("hello")
    with process_group(config, join) as worker:
        for iteration in range(1, 7):
            for batch in worker.batches([torch.ones(1)]):
                worker.collectives.begin_iteration()
                for number, size in enumerate(sizes):
                    is_wrong = (worker.rank, iteration, number) == (at, 3, 1)
                    one_call(what if is_wrong else "", size)
        print("finished", flush=True)


exit_on_input_error(main)
"""


class Run:
    """The end of a run: exit codes, what each rank printed, and the rows that were kept."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.codes = codes
        self.logs = [(folder / f"log{rank}.txt").read_text() for rank in range(len(codes))]
        kept = folder / "run" / "stopped.json"
        self.kept = json.loads(kept.read_text()) if kept.exists() else None

    @property
    def conclusion(self) -> str:
        assert self.kept
        return self.kept["conclusion"]


def write_program(folder: Path) -> Path:
    script = folder / "ranks.py"
    script.write_text(PROGRAM.format(root=str(ROOT)))
    return script


def run_ranks(folder: Path, what: str, at: int, workers: int = 3, sizes: str = "(3, 5, 7)") -> Run:
    """Run to the end; `at` is the rank that does `what`."""
    return Run(folder, wait(start(write_program(folder), workers, folder, what, at, sizes)))
