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
from pathlib import Path

import torch
import torch.distributed as dist

EXCHANGES = 20
BOOT = Path("/proc/sys/kernel/random/boot_id")  # changes at every boot


@dataclass(frozen=True)
class Reading:
    """At `time` of rank 0's clock, a rank's clock was ahead by `offset`, give or take `error` (seconds)."""

    time: float
    offset: float = 0.0
    error: float = 0.0


def this_machine() -> str:
    """Return a name that no other machine has."""
    return BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


def read_clocks(
    device: torch.device, machine: str = "", now: Callable[[], float] = time.perf_counter
) -> list[Reading] | None:
    """Compare the clocks of all ranks; every rank of the process group must call this. Only rank 0 gets the result."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    machines: list[str] = [""] * world_size
    dist.all_gather_object(machines, machine or this_machine())
    elsewhere = [other for other in range(world_size) if machines[other] != machines[0]]
    if rank == 0:
        return [_ask(other, device, now) if other in elsewhere else Reading(now()) for other in range(world_size)]
    if rank in elsewhere:
        _answer(device, now)
    return None


def _ask(rank: int, device: torch.device, now: Callable[[], float]) -> Reading:
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    readings = []
    for _ in range(EXCHANGES):
        before = now()
        dist.send(stamp, rank)
        dist.recv(stamp, rank)
        other_time, after = stamp.item(), now()
        middle = (before + after) / 2
        readings.append(Reading(middle, other_time - middle, (after - before) / 2))
    return min(readings, key=lambda reading: reading.error)


def _answer(device: torch.device, now: Callable[[], float]) -> None:
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(EXCHANGES):
        dist.recv(stamp, 0)
        stamp.item()  # NCCL's recv returns before the message is here
        stamp.fill_(now())
        dist.send(stamp, 0)


@dataclass(frozen=True)
class Clock:
    """Converts a rank's times to rank 0's clock, from two readings: one clock may also run faster than another."""

    first: Reading
    last: Reading

    @property
    def error(self) -> float:
        return max(self.first.error, self.last.error)

    def to_first_rank(self, seconds: float) -> float:
        """Return the time on rank 0's clock at which this rank's clock showed `seconds`."""
        passed = self.last.time - self.first.time
        drift = (self.last.offset - self.first.offset) / passed if passed else 0.0
        return self.first.time + (seconds - self.first.offset - self.first.time) / (1 + drift)
