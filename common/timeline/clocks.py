"""Measures how far the clock of every rank is ahead of rank 0's, by exchanging time stamps.

    rank 0    asks at t0 ─────────┐          ┌──> t1
    rank r                        └──> t ────┘            t was read between t0 and t1: t - (t0 + t1) / 2, give or take
                                                          (t1 - t0) / 2. Of several exchanges, the fastest counts.

Processes of one machine share a clock: no exchange is needed.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.linux import boot_id

EXCHANGES = 20


@dataclass(frozen=True)
class Clock:
    """A rank's clock: how far it is ahead of rank 0's, give or take `error` (seconds)."""

    ahead: float = 0.0
    error: float = 0.0


def this_machine() -> str:
    """Return a name that no other machine has."""
    return boot_id() or socket.gethostname()


def read_clocks(device: torch.device, machine: str = "", now: Callable[[], float] = time.time) -> list[Clock] | None:
    """Compare the clocks of all ranks; every rank of the process group must call this. Only rank 0 gets the result."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    machines: list[str] = [""] * world_size
    dist.all_gather_object(machines, machine or this_machine())
    elsewhere = [other for other in range(world_size) if machines[other] != machines[0]]
    if rank == 0:
        return [_ask(other, device, now) if other in elsewhere else Clock() for other in range(world_size)]
    if rank in elsewhere:
        _answer(device, now)
    return None


def _ask(rank: int, device: torch.device, now: Callable[[], float]) -> Clock:
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    clocks = []
    for _ in range(EXCHANGES):
        before = now()
        dist.send(stamp, rank)
        dist.recv(stamp, rank)
        other_time, after = stamp.item(), now()
        clocks.append(Clock(other_time - (before + after) / 2, (after - before) / 2))
    return min(clocks, key=lambda clock: clock.error)


def _answer(device: torch.device, now: Callable[[], float]) -> None:
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(EXCHANGES):
        dist.recv(stamp, 0)
        stamp.item()  # NCCL's recv returns before the message is here
        stamp.fill_(now())
        dist.send(stamp, 0)
