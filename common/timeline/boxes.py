"""What a timeline consists of: boxes on the rows of ranks, and steps. Measured and predicted timelines look alike.

Every rank has two rows: "process" with its phases, and "network" with its collectives and messages. Times are seconds
on one clock for all ranks; 0 is the beginning of the first step that is shown.
"""

from dataclasses import dataclass, field
from typing import Literal

Row = Literal["process", "network"]
Phase = Literal["data", "forward", "backward", "communication", "optimizer", "pipeline"]


@dataclass(frozen=True)
class Wait:
    """A rank is blocked from `start` to `end` because `rank`, the last one to arrive, has not arrived yet."""

    start: float
    end: float
    rank: int


@dataclass(frozen=True)
class Box:
    """Something that a rank does. name: a phase on the row "process", a collective on the row "network"."""

    rank: int
    row: Row
    name: str
    start: float
    end: float
    bytes: int = 0  # handed over by this rank; 0 on the row "process"
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True)
class Step:
    """One iteration of one rank. number: counted from 0."""

    rank: int
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Some steps of a run. clock_error: how far, in seconds, the clocks of two ranks may differ; 0 for one clock."""

    title: str
    world_size: int
    steps: tuple[Step, ...]
    boxes: tuple[Box, ...]
    clock_error: float = 0.0
    predicted: bool = False
    notes: tuple[str, ...] = field(default=())  # lines below the picture
