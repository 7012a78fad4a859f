"""What a rank does in a step, as a list of instructions; strategies write these lists, simulate.py runs them.

A rank has one thread that computes, and a network that works beside it:

    program     | Compute | Start a | Compute | Start b | Compute | Wait a, b | Compute
    network               |======== a ========|======= b =======|

Ranks that do the same are one kind, and one of them is simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.timeline.boxes import Phase


@dataclass(frozen=True)
class Compute:
    """Seconds of work for this rank's thread, as calibrated with all workers of the machine computing.

    engine: this is what the framework itself costs, beyond the arithmetic. micro_batch: its number, in a pipeline.
    """

    phase: Phase
    seconds: float
    engine: bool = False
    micro_batch: int | None = None


@dataclass(frozen=True)
class Start:
    """Start an operation and go on. It begins when all kinds in `members` have started `key`.

    key: the same on all members, and used once in a step. operation: as in collective_times.py. bytes: handed in by
    this rank. workers: ranks that take part in one such operation. members: their kinds. repeats: so many of them, one
    after the other (the rounds of a ring).
    """

    key: str
    operation: str
    bytes: float
    workers: int
    members: tuple[int, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Wait:
    """Go on when the operation `key` is complete; it may be another rank's, as the receiver of a message does."""

    key: str


Instruction = Compute | Start | Wait


@dataclass(frozen=True)
class Kind:
    """Ranks that run the same program: `ranks` are their numbers, the first stands for all."""

    ranks: Sequence[int]
    program: tuple[Instruction, ...]
