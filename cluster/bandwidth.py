"""How many bits per second an all_reduce really moves out of each worker.

    python -m cluster.launch --workers 4 -- -m cluster.bandwidth
    python -m cluster.launch --hosts node0,node1,node2,node3 -- -m cluster.bandwidth

This speaks to gloo below torch.distributed's usual functions, so that it works before region 2a.1 does. A ring sends
2(N-1)/N of the tensor's bytes out of each of N workers: that number over the time is called the bus bandwidth, and
compares directly with a link's rate.
"""

import argparse
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cluster.doctor import own_address_towards
from common.errors import exit_on_input_error

PATIENCE = timedelta(seconds=60)


def measure(master_ip: str, master_port: int, world_size: int, rank: int, megabytes: int, rounds: int) -> float:
    """Mbit/s out of this worker in the best of `rounds` all_reduces; returns when all workers have measured."""
    store = dist.TCPStore(master_ip, master_port, world_size, is_master=rank == 0, timeout=PATIENCE)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address_towards(master_ip))]  # not the host name's network
    options._timeout = PATIENCE
    group = gloo(store, rank, world_size, options)
    tensor = torch.zeros(megabytes * 10**6 // 4)
    seconds = []
    for _ in range(rounds):
        group.barrier().wait()
        start = time.perf_counter()
        group.allreduce([tensor]).wait()
        seconds.append(time.perf_counter() - start)
    group.barrier().wait()  # rank 0 holds the store: it must not leave first
    return 2 * (world_size - 1) / world_size * megabytes * 8 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="-m cluster.bandwidth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--master_ip", required=True)
    for flag in ("--master_port", "--world_size", "--local_rank"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--megabytes", type=int, default=32, help="size of the tensor (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often (%(default)s)")
    given = parser.parse_args()
    place = (given.master_ip, given.master_port, given.world_size, given.local_rank)
    speed = measure(*place, given.megabytes, given.rounds)
    if given.local_rank == 0:
        print(f"all_reduce of {given.megabytes} MB between {given.world_size} workers, Mbit/s: {speed:.0f}")


if __name__ == "__main__":
    exit_on_input_error(main)
