"""What a step needs and has to share: processors, and a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

SLOTS = 2  # ProcessGroupGloo's default number of threads


@dataclass(frozen=True)
class Transfer:
    """One operation alone: seconds before bytes flow, seconds in which they flow, cores that it wants meanwhile."""

    latency: float
    flow: float
    cores: float


class Network(Protocol):
    """How long operations take; see collective_times.py."""

    @property
    def is_shaped(self) -> bool:
        """Return whether transfers of a rank share its link."""

    def transfer(self, operation: str, size: float, workers: int, spent: float) -> Transfer:
        """Return the operation alone, when `spent` bytes have left the rank since the link was idle."""

    def moved(self, operation: str, size: float, workers: int) -> float:
        """Return the bytes that one rank sends."""

    def refill(self) -> float:
        """Return how many bytes of a burst an idle link gets back in a second."""


@dataclass(frozen=True)
class Machine:
    """cores: that ranks share. is_shared: by all ranks of the step; otherwise each rank has a machine of its own.

    threads: with which one rank computes. launch: seconds of the computing thread to start an operation.
    slots: collectives that a rank has under way at a time.
    """

    cores: float
    is_shared: bool
    threads: int = 1
    launch: float = 0.0
    slots: int = SLOTS


def fair_level(cores: float, wanted: Sequence[tuple[float, float]]) -> float:
    """Return the most that a thread gets when cores are shared fairly; infinity if all get what they want.

    wanted: (number of threads, cores that each of them wants).
    """
    left, threads = cores, sum(count for count, _ in wanted)
    for count, want in sorted(wanted, key=lambda pair: pair[1]):
        if want * threads > left:
            return left / threads
        left, threads = left - count * want, threads - count
    return float("inf")
