"""Three small programs to begin with: join n workers, send a tensor from one to another, sum a tensor over all.

All workers run this file; only their rank differs. The program needs region 2a.1: solve it after task 1 in
task2a_gather_scatter/run_glue.py, then run `python submit.py carry`, which copies your lines here. Start all workers,

    python -m cluster.launch --workers 4 -- cluster/hello.py --step all

or by hand, one in each of four terminals or on each of four nodes (R is 0, 1, 2, 3):

    python cluster/hello.py --step all --master_ip 127.0.0.1 --master_port 6585 --world_size 4 --local_rank R

Then try what happens when one of the four workers is never started, and when only rank 0 calls all_reduce.
"""

import argparse
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
import torch.distributed as dist

from common.arguments import parse_worker_arguments
from common.errors import InputError, exit_on_input_error
from common.workers.process_group import process_group

STEPS = ("join", "send", "all_reduce")


def join(config):
    """[1] Connect to the other workers; return when all config.world_size workers have called this.

    Rank 0 listens on config.master_ip:config.master_port. Every other rank connects there and gets the addresses of
    the rest. config.rank is 0 to world_size-1, config.backend is "gloo" on CPUs and "nccl" on GPUs.

    2a.1  Join the process group at tcp://master_ip:master_port, with the backend, size and rank of `config`.
    """
    # TODO(cos598d) 2a.1: call init_process_group once (1-6 lines)
    # BEGIN SOLUTION 2a.1
    dist.init_process_group(
        backend=config.backend,
        init_method=f"tcp://{config.master_ip}:{config.master_port}",
        world_size=config.world_size,
        rank=config.rank,
    )
    # END SOLUTION 2a.1


def join_or_explain(config):
    """Call join; while region 2a.1 is unsolved, say in the error where to solve it."""
    try:
        join(config)
    except NotImplementedError as error:
        home = "solve it in task2a_gather_scatter/run_glue.py, then `python submit.py carry` copies it here"
        error.args = (f"{error}; {home}",)
        raise


def send(worker):
    """[2] Point to point: rank 0 sends a (3,) tensor to rank 1; the other ranks do nothing."""
    if worker.rank == 0:
        tensor = torch.tensor([1.0, 2.0, 3.0], device=worker.device)
        dist.send(tensor, dst=1)  # may return before rank 1 asks for it: a small tensor waits in a buffer
        print(f"rank 0 sent {tensor.tolist()}")
    elif worker.rank == 1:
        tensor = torch.zeros(3, device=worker.device)  # only the numbers are sent: rank 1 must know shape and dtype
        dist.recv(tensor, src=0)  # waits for rank 0, for as long as it takes
        print(f"rank 1 received {tensor.tolist()}")


def all_reduce(worker):
    """[3] Collective: every rank passes a (2,) tensor, which is replaced by the sum over all ranks."""
    tensor = torch.tensor([worker.rank + 1.0, 10.0 * (worker.rank + 1)], device=worker.device)
    own_values = tensor.tolist()
    dist.all_reduce(tensor)  # every rank waits here for every other: all must call it, in the same order
    print(f"rank {worker.rank} passed {own_values} and got the sum {tensor.tolist()}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="The flags of the task scripts: --master_ip --master_port --world_size --local_rank --hang_seconds ...",
    )
    parser.add_argument("--step", choices=(*STEPS, "all"), default="all", help="which of the programs to run")
    own, others = parser.parse_known_args()
    config = parse_worker_arguments("hello", others)
    steps = STEPS if own.step == "all" else (own.step,)
    if "send" in steps and config.world_size < 2:
        raise InputError("--step send: expected --world_size 2 or more, got 1: rank 0 needs a rank to send to")
    with process_group(config, join_or_explain) as worker:  # nothing else works before this
        print(f"rank {worker.rank} of {worker.world_size} has joined, on {socket.gethostname()}")
        if "send" in steps:
            send(worker)
        if "all_reduce" in steps:
            all_reduce(worker)


if __name__ == "__main__":
    exit_on_input_error(main)
