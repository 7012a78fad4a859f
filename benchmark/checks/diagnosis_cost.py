"""The cost of the watchdog that explains why a run stops: its thread and store, and the notes of a step.

    python -m benchmark.checks.diagnosis_cost [--rounds 20] [--steps 20] [--workers 2] [--quick]

Real ranks with gloo train the tiny GPT-2 with one all_reduce per parameter. In each round every rank makes as many
steps with the watchdog as without, in turns within one process. CPU seconds are compared, not wall time: they leave
out other programs. Rounds differ by more than the watchdog costs. So its thread and rank 0's store are read directly,
too. Last line of stdout: {"share": of a step, by thread, store and notes, "ratio": with to without, ...}; exit code 0
if the share is at most 0.005.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it also starts as a script, on every rank
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import numpy as np
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel

from benchmark.measure.intervals import interval
from common.arguments import parse_worker_arguments
from common.config import RunConfig
from common.errors import exit_on_input_error
from common.models.load import model_path
from common.paths import ROOT, atomic_write
from common.workers.collectives import CollectiveLog, turn_on_recorder
from common.workers.process_group import choose_interface
from common.workers.pulse import Pulse, Thread
from common.workers.roll_call import call_the_roll
from common.workers.watchdog import Watchdog

LIMIT = 0.005
EXAMPLES, TOKENS = 4, 64
PHASES = 4  # of an iteration that Record notes


def make_step() -> Callable[[], None]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel.from_pretrained(model_path("tiny", "gpt2"))
    tokens = torch.randint(5, 500, (EXAMPLES, TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()

    return step


def note(pulse: Pulse, collectives: CollectiveLog) -> None:
    """What Record and Worker.batches note in a step for the watchdog."""
    pulse.beat()
    collectives.begin_iteration()
    for _ in range(PHASES):
        pulse.phase = "forward"
        pulse.phase = ""


def store_seconds() -> float:
    """CPU seconds of the threads that serve the ranks' stores in this process (Linux)."""
    threads = [task for task in Path("/proc/self/task").glob("*") if "tcpstore" in (task / "comm").read_text()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e9


def block(config: RunConfig, step: Callable[[], None], steps: int, watched: bool) -> tuple[float, float]:
    """CPU seconds of this process for some steps, and of the watchdog's thread and the store among them."""
    pulse, collectives = Pulse(), CollectiveLog()
    watchdog = Watchdog(config, pulse, collectives) if watched else None
    thread = Thread(watchdog.thread_ident) if watchdog else None
    dist.barrier()
    begin, own = time.process_time(), store_seconds() + (thread.cpu_seconds or 0.0 if thread else 0.0)
    for _ in range(steps):
        if watched:
            note(pulse, collectives)
        step()
    dist.barrier()
    seconds = time.process_time() - begin
    own = store_seconds() + (thread.cpu_seconds or 0.0 if thread else 0.0) - own
    if watchdog:
        watchdog.close()
    return seconds, own


def work() -> None:
    """One rank; rank 0 writes (rounds, 3): CPU seconds watched, unwatched, of thread and store."""
    rounds, steps, out = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    config = parse_worker_arguments("diagnosis_cost", ["--output_dir", str(out), *sys.argv[5:]])
    turn_on_recorder()
    choose_interface(config.master_ip)
    call_the_roll(config)
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=config.rank, world_size=config.world_size)
    step = make_step()
    block(config, step, steps, watched=False)  # warms up
    rows = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        found = {watched: block(config, step, steps, watched) for watched in order}
        rows.append([found[True][0], found[False][0], found[True][1]])
    if config.rank == 0:
        with atomic_write(out / "seconds.json") as file:
            json.dump(rows, file)
    dist.barrier()
    dist.destroy_process_group()


def note_seconds(repeats: int = 20_000) -> float:
    """CPU seconds of one step's notes."""
    pulse, collectives = Pulse(), CollectiveLog()
    begin = time.process_time()
    for _ in range(repeats):
        note(pulse, collectives)
    return (time.process_time() - begin) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds with and without the watchdog (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps per round (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="number of workers (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, takes seconds; the limit is not checked")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 2, 3
    with tempfile.TemporaryDirectory() as folder:
        words = ["--as_rank", str(arguments.rounds), str(arguments.steps), folder]
        command = [sys.executable, "-m", "cluster.launch", "--workers", str(arguments.workers), "--", __file__, *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        watched, unwatched, thread = np.array(json.loads((Path(folder) / "seconds.json").read_text())).T
    step = float(np.median(unwatched)) / arguments.steps
    share = float(thread.sum() / watched.sum()) + note_seconds() / step
    ratio, low, high = interval(watched / unwatched)
    print(f"a step takes {step * 1e3:.1f} ms of CPU on rank 0; the watchdog and its notes {share:.3%} of it")
    print(
        f"time with the watchdog / without: {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f} ({len(watched)} rounds)"
    )
    print(json.dumps({"share": share, "ratio": ratio, "interval": [low, high], "torch": torch.__version__}))
    sys.exit(not (arguments.quick or share <= LIMIT))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as_rank"]:
        exit_on_input_error(work)
    else:
        exit_on_input_error(main)
