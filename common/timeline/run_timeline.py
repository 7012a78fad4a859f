"""--timeline from beginning to end: a Record calls this in every step, and at the end of the run it writes the files.

timeline.png     the picture, for the report
timeline.html    the same for a browser: zoom, and point at a box
timeline.json    for https://ui.perfetto.dev
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.config import RunConfig
from common.paths import shown
from common.timeline.boxes import Box, Timeline, Wait
from common.timeline.capture import Capture, RankLog
from common.timeline.clocks import Clock, read_clocks
from common.timeline.page import write_page
from common.timeline.parts import parts, table
from common.timeline.picture import draw
from common.timeline.spans import Span, merged, spans_of, within, without
from common.timeline.trace import write_trace
from common.timeline.waiting import WaitMessage, by_key, delivered, keys, spreads, waits
from common.workers.process_group import Worker


class RunTimeline:
    """The timeline of a run: `capture` collects it on every rank, rank 0 brings it together."""

    def __init__(self, config: RunConfig, worker: Worker) -> None:
        self.capture = Capture(worker.rank, config.timeline, worker.device.type == "cuda")
        self._title = f"{config.task}, {config.world_size} worker{'s' if config.world_size > 1 else ''}"
        self._worker = worker
        self._clocks = [Clock()]  # on rank 0: of every rank
        self._timeline: Timeline | None = None

    def read_clocks(self) -> None:
        """Compare the clocks of all ranks. Every rank must call it, before training."""
        if self._worker.world_size > 1:
            self._clocks = read_clocks(self._worker.device) or []

    def finish(self) -> dict | None:
        """Bring together what all ranks saw; return this rank's numbers for its record. Every rank must call it."""
        self.capture.stop()
        if not self.capture.log.steps:
            return None
        everyone = gather(self.capture.log)
        numbers: list = [None]
        if everyone:
            self._timeline = assemble(self._title, secrets.token_hex(8), everyone, self._clocks)
            rows = [asdict(row) for row in parts(self._timeline)]
            numbers = [{"run": self._timeline.run, "clock_error": self._timeline.clock_error, "steps": rows}]
        if self._worker.world_size > 1:
            dist.broadcast_object_list(numbers, src=0, device=self._worker.device)
            numbers[0]["steps"] = [row for row in numbers[0]["steps"] if row["rank"] == self._worker.rank]
        return numbers[0]

    def write(self, folder: Path) -> None:
        """Write the three files, and print where the time of a step went; only rank 0 has something to write."""
        if self._timeline is None:
            if self._worker.is_first:
                print("no timeline: this run had no training step")
            return
        write_trace(self._timeline, folder / "timeline.json")
        write_page(self._timeline, folder / "timeline.html")
        draw(self._timeline, folder / "timeline.png")
        print(table(self._timeline))
        print(f"timeline: {shown(folder)}/timeline.png, timeline.html (a browser), timeline.json (ui.perfetto.dev)")


ON_GPU = "on GPUs, the end of a collective is not measured: its box ends when it is queued"


def gather(log: RankLog) -> list[RankLog]:
    """Return on rank 0 the logs of all ranks, and an empty list on the others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [log]
    everyone = [log] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(log, everyone)
    return everyone or []


def assemble(title: str, run: str, everyone: Sequence[RankLog], clocks: Sequence[Clock]) -> Timeline:
    """Return the timeline of all ranks. clocks: one for each rank."""
    pairs = list(zip(everyone, clocks, strict=True))
    zero = min(step.start - clock.ahead for log, clock in pairs for step in log.steps)
    moved = [shifted(log, -clock.ahead - zero) for log, clock in pairs]
    if moved[0].partitions:
        return timeline_of_threads(title, run, moved[0])
    calls = by_key([log.messages for log in moved])
    steps = [step for log in moved for step in log.steps]
    boxes = [box for log in moved for box in [*process_boxes(log), *network_boxes(log, calls)]]
    error = sum(sorted(clock.error for clock in clocks)[-2:])
    on_gpu = any(log.on_gpu for log in moved)
    notes = (ON_GPU,) if on_gpu else ()
    return Timeline(title, len(moved), tuple(steps), tuple(boxes), error, notes=notes, run=run, on_gpu=on_gpu)


def shifted(log: RankLog, seconds: float) -> RankLog:
    """Return the same with every time later by so many seconds."""

    def moved(part):
        return replace(part, start=part.start + seconds, end=part.end + seconds)

    lists = {name: value for name, value in vars(log).items() if isinstance(value, list)}
    parts_of_log: dict[str, Any] = {name: [moved(part) for part in value] for name, value in lists.items()}
    return replace(log, **parts_of_log)


def process_boxes(log: RankLog) -> list[Box]:
    """The boxes on a rank's row "process": its phases, cut where it was blocked; there it communicates.

    The phase communication is cut where the process ran its own code: that is averaging.
    """
    blocked = merged(spans_of(log.blocked))
    of_pipeline = spans_of(log.micro_batches)
    boxes = list(log.averaging)
    for box in log.phases:
        boxes += cut(box, spans_of(log.averaging) if box.name == "communication" else [*blocked, *of_pipeline])
    for box in [*log.micro_batches, *_between_micro_batches(log)]:
        boxes += cut(box, blocked)
    in_phase = spans_of(box for box in log.phases if box.name == "communication")
    boxes += [Box(log.rank, "process", "communication", *span) for span in without(blocked, in_phase)]
    return sorted(boxes, key=lambda box: (box.start, box.end))


def cut(box: Box, holes: list[Span]) -> list[Box]:
    """Return what is left of a box without the time in `holes`."""
    return [replace(box, start=start, end=end) for start, end in without([(box.start, box.end)], holes)]


def _between_micro_batches(log: RankLog) -> list[Box]:
    """Return what a pipeline does in a step outside of its micro-batches, and outside of all phases."""
    boxes = []
    for limits in spans_of(log.steps):
        inside = within(spans_of(log.micro_batches), limits)
        if inside:
            after = [box.start for box in log.phases if box.name == "optimizer" and limits[0] <= box.start < limits[1]]
            whole = (min(start for start, _ in inside), min(after, default=max(end for _, end in inside)))
            boxes += cut(Box(log.rank, "process", "pipeline", *whole), [*inside, *spans_of(log.phases)])
    return boxes


def network_boxes(log: RankLog, calls: dict[tuple, dict[int, WaitMessage]]) -> list[Box]:
    """The boxes on a rank's row "network", with the waits of its process. calls: see by_key."""
    members = [calls[key] for key in keys(log.rank, log.messages)]
    ends = [delivered(log.rank, message, of) for message, of in zip(log.messages, members, strict=True)]
    deliveries = [
        (max(other.start for other in of.values()), end)
        for message, of, end in zip(log.messages, members, ends, strict=True)
        if spreads(log.rank, message, of)
    ]
    waited: dict[int, list[Wait]] = {}
    for part in log.blocked:
        i = part.message
        earlier = within(deliveries, (part.start, part.end))
        waited.setdefault(i, []).extend(waits(log.rank, log.messages[i], members[i], part, earlier))
    return [
        Box(log.rank, "network", message.name, message.start, end, message.bytes, tuple(waited.get(i, ())))
        for i, (message, end) in enumerate(zip(log.messages, ends, strict=True))
    ]


CALLER = 0  # its row; partition j has row j + 1


def timeline_of_threads(title: str, run: str, log: RankLog) -> Timeline:
    """Return the timeline of one process and its partitions."""
    count = max(box.rank for box in log.partitions)
    boxes = [part for phase in log.phases for part in _caller_boxes(phase, log.partitions)]
    for row in range(1, count + 1):
        of_partition = [box for box in log.partitions if box.rank == row]
        for limits in spans_of(log.steps):
            boxes += _partition_boxes(count, of_partition, limits)
    labels = ("caller", *(f"part. {partition}" for partition in range(count)))
    steps = [replace(step, rank=row) for row in range(count + 1) for step in log.steps]
    return Timeline(title, count + 1, tuple(steps), tuple(boxes), labels=labels, run=run)


def _caller_boxes(phase: Box, partitions: list[Box]) -> list[Box]:
    """The caller's boxes in one phase: it waits from the first task of a worker until the last one has ended."""
    inside = [box for box in partitions if phase.start <= box.start and box.end <= phase.end]
    if not inside:
        return [phase]
    last = max(inside, key=lambda box: box.end)
    pipe = (min(box.start for box in inside), last.end)
    before, *after = cut(phase, [pipe]) or [replace(phase, start=phase.end)]
    return [replace(before, waits=(Wait(*pipe, last.rank),)), *after]


def _partition_boxes(count: int, boxes: list[Box], limits: Span) -> list[Box]:
    """Return the boxes of one of `count` partitions in one step.

    Before each box, the partition waits for its input, from another partition or from the caller.
    """
    with_waits: list[Box] = []
    idle_from = limits[0]
    own = sorted((box for box in boxes if limits[0] <= box.start < limits[1]), key=lambda box: box.start)
    for box in own:
        source = box.rank - 1 if box.phase == "forward" else box.rank + 1
        waits = [Wait(idle_from, box.start, source if source <= count else CALLER)]
        if box is own[-1]:
            waits.append(Wait(box.end, limits[1], CALLER))
        with_waits.append(replace(box, waits=tuple(waits)))
        idle_from = box.end
    return with_waits
