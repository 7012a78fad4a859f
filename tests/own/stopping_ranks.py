"""Runs that stop, with real processes and gloo: one whose ranks do what a test asks for, and scripts that hang."""

import json
from pathlib import Path

from common.paths import ROOT
from tests.own.workers import group

# Six iterations of three all_reduces. The first word names what goes wrong, in iteration 3 at the second of them.
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
    return Run(folder, group(write_program(folder), workers, folder, what, at, sizes))


# For scripts that wait for ever at some place. Their watchdog is patient until a thread of the script sees that the
# place is reached, so that no test depends on the time.
BEGINNING = f"""
import runpy, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
import common.workers.process_group as module
from common.workers.pulse import Thread

main = Thread()
configs = []


class Watchdog(module.Watchdog):
    def __init__(self, config, *arguments, **named):
        configs.append(config)
        super().__init__(config, *arguments, **named)


module.Watchdog = Watchdog


def lose_patience_when(reached):
    def watch():
        while not reached():
            time.sleep(0.01)
        object.__setattr__(configs[0], "hang_seconds", 0.1)

    threading.Thread(target=watch, daemon=True).start()


def go_on_as(script):
    sys.argv[0] = {str(ROOT)!r} + "/" + script
    runpy.run_path(sys.argv[0], run_name="__main__")

"""


def hang(folder: Path, program: str, *words: object, workers: int = 1) -> Run:
    """Run `program`, after the beginning above, until the watchdog has ended it."""
    script = folder / "hangs.py"
    script.write_text(BEGINNING + program)
    return Run(folder, group(script, workers, folder, *words, "--hang_seconds", 600, "--no_cuda"))
