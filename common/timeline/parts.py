"""Divides the time of a step into its parts: computing, data, exposed communication, waiting, and the rest.

    step = computing + data + exposed + waiting + other

- computing: includes the process's own code in the phase communication, such as computing the mean.
- exposed: the process is blocked by a message, and every rank that it needs has arrived.
- waiting: the process is blocked, and the last rank that it needs has not arrived.
- other: between the phases, such as reading the loss and printing.
- hidden: communication while the process does something else. It is not part of the sum.

On a GPU, a rank does not see when a collective is complete, so waiting and hidden are None. exposed is then the whole
phase communication, waiting included, or None without such a phase: DDP's communication is in computing.
"""

from dataclasses import dataclass

from common.timeline.boxes import Box, Step, Timeline
from common.timeline.spans import duration, merged, spans_of, within, without

COMPUTING = ("forward", "backward", "averaging", "optimizer", "pipeline")
NAMES = ("computing", "data", "exposed", "waiting", "other")  # they add up to the step


@dataclass(frozen=True)
class Parts:
    """The parts of one step of one rank, in seconds."""

    rank: int
    step: int
    seconds: float
    computing: float
    data: float
    exposed: float | None
    waiting: float | None
    other: float
    hidden: float | None


def parts(timeline: Timeline) -> list[Parts]:
    """Return the parts of every step of every rank."""
    return [
        _parts_of_step(step, [box for box in timeline.boxes if box.rank == step.rank], timeline.on_gpu)
        for step in timeline.steps
    ]


def _parts_of_step(step: Step, own: list[Box], on_gpu: bool) -> Parts:
    """own: all boxes of the step's rank."""
    limits = (step.start, step.end)
    process = [box for box in own if box.row == "process"]
    waiting = merged(within(spans_of(wait for box in own for wait in box.waits), limits))

    def time_in(*phases: str) -> float:
        return duration(without(within(spans_of(box for box in process if box.phase in phases), limits), waiting))

    seconds = step.end - step.start
    computing, data, exposed = time_in(*COMPUTING), time_in("data"), time_in("communication")
    other = seconds - computing - data - exposed - duration(waiting)
    if on_gpu:
        return Parts(step.rank, step.number, seconds, computing, data, exposed or None, None, other, None)
    network = spans_of(box for box in own if box.row == "network")
    communication = spans_of(box for box in process if box.phase == "communication")
    hidden = duration(without(merged(within(network, limits)), [*communication, *waiting]))
    return Parts(step.rank, step.number, seconds, computing, data, exposed, duration(waiting), other, hidden)


def mean(rows: list[Parts]) -> dict[str, float | None]:
    """Return the mean of each part, and of the step, in seconds; None for a part that was not measured."""
    values = {name: [getattr(row, name) for row in rows] for name in ("seconds", *NAMES, "hidden")}
    return {name: None if None in column else sum(column) / max(1, len(rows)) for name, column in values.items()}


def milliseconds(seconds: float | None, digits: int = 2) -> str:
    """Return a table's cell, "-" where nothing was measured."""
    return "-" if seconds is None else f"{seconds * 1e3:.{digits}f}"


def table(timeline: Timeline) -> str:
    """Return the mean of the steps for every rank, in milliseconds, as lines for a terminal."""
    rows = parts(timeline)
    numbers = sorted({row.step for row in rows})
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    lines = [f"{f'{which}, ms':<16} {'step':>9} " + " ".join(f"{name:>9}" for name in NAMES) + f" {'(hidden)':>10}"]
    for rank in range(timeline.world_size):
        of_rank = mean([row for row in rows if row.rank == rank])
        cells = " ".join(f"{milliseconds(of_rank[name]):>9}" for name in ("seconds", *NAMES))
        lines.append(f"{timeline.label(rank):<16} {cells} {milliseconds(of_rank['hidden']):>10}")
    return "\n".join(lines)
