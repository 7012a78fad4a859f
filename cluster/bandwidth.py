"""Measures how many bits per second every worker sends to its neighbour while all do so at the same time.

    python -m cluster.launch --workers 4 -- -m cluster.bandwidth
    python -m cluster.launch --hosts node0,node1,node2,node3 -- -m cluster.bandwidth

Each worker sends a tensor to the next one and receives one from the worker before it, as in a ring. This uses Gloo
directly, so it works before region 2a.1 is solved. Compare the figure with the rate of a link.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.errors import exit_on_input_error
from common.workers.machine import own_address

PATIENCE = timedelta(seconds=60)
MEGABYTES, TRANSFERS = 32, 5


def measure(master_ip: str, master_port: int, world_size: int, rank: int) -> float:
    """Mbit/s out of this worker in its fastest transfer; returns when all workers have measured."""
    store = dist.TCPStore(master_ip, master_port, world_size, is_master=rank == 0, timeout=PATIENCE)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address(master_ip))]  # not the host name's network
    options._timeout = PATIENCE
    group = gloo(store, rank, world_size, options)
    outgoing, incoming = (torch.zeros(MEGABYTES * 10**6 // 4) for _ in range(2))
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    seconds = []
    for _ in range(TRANSFERS):
        group.barrier().wait()
        start = time.perf_counter()
        sending = group.send([outgoing], after, 0)
        group.recv([incoming], before, 0).wait()
        sending.wait()
        seconds.append(time.perf_counter() - start)
    group.barrier().wait()  # rank 0 holds the store: it must not leave first
    return MEGABYTES * 8 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="-m cluster.bandwidth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--master_ip", required=True)
    for flag in ("--master_port", "--world_size", "--local_rank"):
        parser.add_argument(flag, type=int, required=True)
    arguments = parser.parse_args()
    speed = measure(arguments.master_ip, arguments.master_port, arguments.world_size, arguments.local_rank)
    if arguments.local_rank == 0:
        print(f"each of {arguments.world_size} workers sends {MEGABYTES} MB to the next one, Mbit/s: {speed:.0f}")


if __name__ == "__main__":
    exit_on_input_error(main)
