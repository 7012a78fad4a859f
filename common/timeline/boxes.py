"""The parts of a timeline: boxes on the rows of ranks, and steps.

Every rank has two rows: "process" with its phases, and "network" with its collectives and messages. Times are seconds
on one clock for all ranks; 0 is the beginning of the first step that is shown.

The boxes of a rank on the row "process" do not overlap. While a rank is blocked, its phase is communication, also in
the middle of backward. What its own code computes in the phase communication, such as the mean, is averaging. Boxes on
the row "network" may overlap: several collectives can be on their way.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

Row = Literal["process", "network"]
Phase = Literal["data", "forward", "backward", "communication", "averaging", "optimizer", "pipeline"]


@dataclass(frozen=True)
class Wait:
    """A rank is blocked from `start` to `end` because `rank`, the last one to arrive, has not arrived yet."""

    start: float
    end: float
    rank: int


@dataclass(frozen=True)
class Box:
    """Something that a rank does.

    name: on the row "process" a phase, in a pipeline with its micro-batch ("forward 2"); on the row "network" a
    collective. A collective begins when this rank enters it, and ends when it is complete on this rank.
    waits: the times in which this collective blocks the process because another rank has not arrived; drawn on the row
        "process".
    """

    rank: int
    row: Row
    name: str
    start: float
    end: float
    bytes: int = 0  # of the tensors that this rank passed in, or received by a recv; 0 on the row "process"
    waits: tuple[Wait, ...] = ()

    @property
    def phase(self) -> str:
        """The name without a micro-batch."""
        return self.name.split(" ")[0]


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
    notes: tuple[str, ...] = field(default=())  # lines below the picture
    labels: tuple[str, ...] = ()  # names of the ranks, where they are not rank 0, rank 1, ...
    run: str = ""  # drawn at random by rank 0 of a measured run; records of the same run hold it, too
    on_gpu: bool = False  # then boxes of the row "network" end when the collective is queued, and there are no waits

    def label(self, rank: int) -> str:
        """The name of a rank's row."""
        return self.labels[rank] if self.labels else f"rank {rank}"

    @property
    def clock(self) -> str:
        """One line about the clock, for below the picture."""
        if self.clock_error == 0:
            return "all ranks on one clock"
        return f"the clocks of two ranks differ by at most {self.clock_error * 1e3:.3f} ms"


def shortest_step(timeline: Timeline) -> Timeline:
    """Return the step that took the least time, which was disturbed least, as a timeline that begins at 0."""
    by_number: dict[int, list[Step]] = {}
    for step in timeline.steps:
        by_number.setdefault(step.number, []).append(step)
    steps = min(
        by_number.values(), key=lambda ranks: max(step.end - step.start for step in ranks)
    )  # the slowest counts
    start, end = min(step.start for step in steps), max(step.end for step in steps)
    limits = {step.rank: (step.start, step.end) for step in steps}

    def moved(part):
        return replace(part, start=part.start - start, end=min(part.end, end) - start)

    boxes = [
        replace(moved(box), waits=tuple(moved(wait) for wait in box.waits))
        for box in timeline.boxes
        if limits[box.rank][0] <= box.start < limits[box.rank][1]
    ]
    return replace(timeline, steps=tuple(moved(step) for step in steps), boxes=tuple(boxes))


def lanes(boxes: list[Box]) -> list[list[Box]]:
    """Distribute boxes over as few lanes as possible, in which none overlap; earlier boxes come first."""
    lanes_so_far: list[list[Box]] = []
    for box in sorted(boxes, key=lambda box: (box.start, box.end)):
        for lane in lanes_so_far:
            if lane[-1].end <= box.start:
                lane.append(box)
                break
        else:
            lanes_so_far.append([box])
    return lanes_so_far
