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

from common.timeline.boxes import Timeline
from common.timeline.spans import duration, merged, within, without

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
    rows = []
    for step in timeline.steps:
        limits = (step.start, step.end)
        own = [box for box in timeline.boxes if box.rank == step.rank]
        process = [(box.phase, (box.start, box.end)) for box in own if box.row == "process"]
        waiting = merged(within([(wait.start, wait.end) for box in own for wait in box.waits], limits))
        communication = [span for phase, span in process if phase == "communication"]

        def time_in(*phases: str, but: list, limits: tuple = limits, process: list = process) -> float:
            return duration(without(within([span for phase, span in process if phase in phases], limits), but))

        network = [(box.start, box.end) for box in own if box.row == "network"]
        computing = time_in(*COMPUTING, but=waiting)
        data = time_in("data", but=waiting)
        exposed = time_in("communication", but=waiting)
        seconds = step.end - step.start
        other = seconds - computing - data - exposed - duration(waiting)
        if timeline.on_gpu:
            row = Parts(step.rank, step.number, seconds, computing, data, exposed or None, None, other, None)
        else:
            hidden = duration(without(merged(within(network, limits)), [*communication, *waiting]))
            row = Parts(step.rank, step.number, seconds, computing, data, exposed, duration(waiting), other, hidden)
        rows.append(row)
    return rows


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
