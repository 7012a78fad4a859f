"""Run the survive lesson: a small job that continues from its newest checkpoint. This code is given.

    python -m cluster.launch --workers 4 -- beyond/run_survive.py --steps 40
    torchrun --nnodes 1 --nproc-per-node 4 --max-restarts 3 beyond/run_survive.py --steps 40 --kill 2:9 --kill 0:14

Each --kill RANK:N is for one attempt, in their order: in it, this rank is killed (SIGKILL) before its N-th put or
delete. With --mtbf, each attempt ends at a drawn moment. Rank 0 prints time and loss of every step.
"""

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
import torch.distributed as dist
from torch import Tensor

from beyond.small_job import SmallJob
from beyond.storage import Folder, State
from beyond.survive import train
from common.errors import exit_on_input_error
from common.workers.machine import interfaces, own_address


def report(text: str) -> None:
    """Print the time and a text, on rank 0."""
    if dist.get_rank() == 0:
        now = time.time()
        print(f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 100) % 100:02} {text}", flush=True)


class ReportingJob(SmallJob):
    """A small job whose first rank prints the loss of every step, which takes at least `seconds`."""

    def __init__(self, seconds: float, seed: int = 7) -> None:
        super().__init__(seed)
        self.seconds = seconds

    def update(self, state: State, gradient: Tensor) -> None:
        time.sleep(self.seconds)
        super().update(state, gradient)
        errors = self.inputs @ self.gather(state) - self.targets  # every rank takes part
        report(f"step {state.step} loss {errors.square().mean():.12f} ranks {dist.get_world_size()}")


class KilledFolder(Folder):
    """A folder whose process is killed before its N-th put or delete; see --kill."""

    def __init__(self, folder: str, at: int) -> None:
        super().__init__(folder)
        self.left = at

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, name: str, value: Any) -> None:
        self.count()
        super().put(name, value)

    def delete(self, name: str) -> None:
        self.count()
        super().delete(name)


def join(flags: argparse.Namespace) -> int:
    """Join the process group; return the number of this attempt, from 0.

    torchrun starts all workers again when one has died. Its store at MASTER_ADDR:MASTER_PORT lives on, and with it the
    addresses that the workers of the first attempt have left there. gloo would connect to these, in vain, and each
    attempt would end after 30 s. Under a prefix of its own, every attempt has an empty store.
    """
    if name := interfaces().get(own_address(flags.master_ip)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the one that leads to rank 0
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = flags.local_rank == 0 and not kept_by_torchrun
    store = dist.TCPStore(flags.master_ip, flags.master_port, is_master=listens, wait_for_workers=False)
    attempts = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=attempts, world_size=flags.world_size, rank=flags.local_rank)
    return attempt


def parse() -> argparse.Namespace:
    """Return the flags; those of the process group come from cluster.launch, or from torchrun's environment."""
    parser = argparse.ArgumentParser(description="Train a small job that survives kills", allow_abbrev=False)
    environment = os.environ.get
    parser.add_argument("--master_ip", default=environment("MASTER_ADDR", "127.0.0.1"), help="address of rank 0")
    parser.add_argument("--master_port", type=int, default=environment("MASTER_PORT", "6585"), help="its port")
    parser.add_argument("--world_size", type=int, default=environment("WORLD_SIZE", "1"), help="number of workers")
    parser.add_argument(
        "--local_rank", type=int, default=environment("RANK", "0"), help="rank of this worker in the job"
    )
    parser.add_argument("--folder", default="runs/survive", help="folder of the checkpoints, the same for all workers")
    parser.add_argument("--steps", type=int, default=40, help="updates in all, those of earlier runs included")
    parser.add_argument("--every", type=int, default=5, help="save after every N updates")
    parser.add_argument("--step_seconds", type=float, default=0.0, help="make each step longer by so much")
    parser.add_argument("--mtbf", type=float, default=0.0, help="mean seconds until a rank is killed (0: never)")
    parser.add_argument("--kill", action="append", default=[], help="RANK:N, once for each attempt")
    return parser.parse_args()


def main() -> None:
    flags = parse()
    torch.set_num_threads(1)
    attempt = join(flags)
    rank, at = (*map(int, flags.kill[attempt].split(":")),) if attempt < len(flags.kill) else (-1, 0)
    storage = KilledFolder(flags.folder, at if rank == dist.get_rank() else 0)
    draw = random.Random(attempt)
    if flags.mtbf and draw.randrange(dist.get_world_size()) == dist.get_rank():
        signal.setitimer(signal.ITIMER_REAL, draw.expovariate(1 / flags.mtbf))  # SIGALRM ends this process
    report("start")
    code = train(storage, ReportingJob(flags.step_seconds), flags.steps, flags.every)
    dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    exit_on_input_error(main)
