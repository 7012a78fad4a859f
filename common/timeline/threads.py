"""The timeline of a pipeline with one worker thread per partition: a row for the caller, and one for each partition."""

from common.timeline.boxes import Box, Step, Timeline, Wait
from common.timeline.capture import PartitionBox, SeenOnRank
from common.timeline.spans import Span, without

CALLER = 0  # its row; partition j has row j + 1


def timeline_of_threads(title: str, run: str, seen: SeenOnRank) -> Timeline:
    """Return the timeline of one process whose partitions `seen` names."""
    count = 1 + max(box.partition for box in seen.partitions)
    boxes = [box for phase in seen.phases for box in _caller_boxes(phase, seen.partitions)]
    for partition in range(count):
        of_partition = [box for box in seen.partitions if box.partition == partition]
        for _, limits in seen.steps:
            boxes += _partition_boxes(partition, count, of_partition, limits)
    labels = ("caller", *(f"part. {partition}" for partition in range(count)))
    steps = [Step(row, number, *span) for row in range(count + 1) for number, span in seen.steps]
    return Timeline(title, count + 1, tuple(steps), tuple(boxes), labels=labels, run=run)


def _caller_boxes(phase: tuple[str, Span], partitions: list[PartitionBox]) -> list[Box]:
    """The caller's boxes in one phase: it waits from the first task of a worker until the last one has ended."""
    name, span = phase
    inside = [box for box in partitions if span[0] <= box.start and box.end <= span[1]]
    if not inside:
        return [Box(CALLER, "process", name, *span)]
    last = max(inside, key=lambda box: box.end)
    pipe = (min(box.start for box in inside), last.end)
    before, *after = without([span], [pipe]) or [(span[1], span[1])]
    waits = (Wait(*pipe, 1 + last.partition),)
    return [Box(CALLER, "process", name, *before, waits=waits), *(Box(CALLER, "process", name, *s) for s in after)]


def _partition_boxes(partition: int, count: int, boxes: list[PartitionBox], limits: Span) -> list[Box]:
    """Return the boxes of one partition in one step.

    Before each box, the partition waits for its input, from another partition or from the caller.
    """
    found: list[Box] = []
    idle_from = limits[0]
    own = sorted((box for box in boxes if limits[0] <= box.start < limits[1]), key=lambda box: box.start)
    for box in own:
        source = partition - 1 if box.name.startswith("forward") else partition + 1
        row = CALLER if source in (-1, count) else 1 + source
        waits = [Wait(idle_from, box.start, row)]
        if box is own[-1]:
            waits.append(Wait(box.end, limits[1], CALLER))
        found.append(Box(1 + partition, "process", box.name, box.start, box.end, waits=tuple(waits)))
        idle_from = box.end
    return found
