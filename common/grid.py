"""Draws a pipeline schedule as a grid: one row per partition, one column per clock cycle, micro-batches in the cells.

It accepts any schedule, even a wrong one: that is when you need a picture most.
"""

from collections.abc import Collection, Iterable


def draw_schedule(schedule: Iterable[Iterable[tuple[int, int]]], marked: Collection[tuple[int, int]] = ()) -> str:
    """Return the schedule as text, one line per partition; `.` is an idle partition.

    schedule: for every clock cycle its (micro-batch, partition) pairs.
    marked: (clock, partition) cells that get a `!`, for instance those that break a rule.
    """
    cells: dict[tuple[int, int], list[str]] = {}
    clocks = 0
    for clock, pairs in enumerate(schedule):
        clocks = clock + 1
        for micro_batch, partition in pairs:
            cells.setdefault((clock, partition), []).append(str(micro_batch))
    marks = set(marked)
    everywhere = {*cells, *marks}
    clocks = max([clocks, *(clock + 1 for clock, _ in everywhere)])
    partitions = sorted({partition for _, partition in everywhere})

    def cell(clock: int, partition: int) -> str:
        return ",".join(cells.get((clock, partition), ".")) + ("!" if (clock, partition) in marks else "")

    rows = [["clock", *map(str, range(clocks))]]
    rows += [[f"partition {p}", *(cell(clock, p) for clock in range(clocks))] for p in partitions]
    first = max(len(row[0]) for row in rows)
    width = max((len(text) for row in rows for text in row[1:]), default=1) + 2
    return "\n".join(row[0].ljust(first) + "".join(text.rjust(width) for text in row[1:]) for row in rows)
