"""--timeline from beginning to end: a Record calls this in every step, and at the end of the run it writes the files.

timeline.png     the picture, for the report
timeline.html    the same for a browser: zoom, and point at a box
timeline.json    for https://ui.perfetto.dev
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist

from common.config import RunConfig
from common.paths import shown
from common.timeline.boxes import Box, Step, Timeline, Wait
from common.timeline.capture import Capture, PartitionBox, RankLog, collector_off
from common.timeline.clocks import Clock, Reading, read_clocks
from common.timeline.page import write_page
from common.timeline.parts import parts, table
from common.timeline.picture import draw
from common.timeline.spans import Span, merged, within, without
from common.timeline.trace import write_trace
from common.timeline.waiting import Message, by_key, delivered, keys, spreads, waits
from common.workers.process_group import Worker


class RunTimeline:
    """The timeline of a run: `capture` collects it on every rank, rank 0 brings it together."""

    def __init__(self, config: RunConfig, worker: Worker) -> None:
        self.capture = Capture(worker.rank, config.timeline, worker.device.type == "cuda")
        self._title = f"{config.task}, {config.world_size} worker{'s' if config.world_size > 1 else ''}"
        self._worker = worker
        self._clocks: list[list[Reading]] = []  # on rank 0: of every rank, before and after training
        self._timeline: Timeline | None = None

    def read_clocks(self) -> None:
        """Compare the clocks of all ranks. Every rank must call it, before training and after it."""
        if self._worker.world_size > 1:
            self._clocks.append(read_clocks(self._worker.device) or [])
        else:
            self._clocks.append([Reading(0.0)])

    def finish(self) -> dict | None:
        """Bring together what all ranks saw; return this rank's numbers for its record. Every rank must call it."""
        self.capture.stop()
        if not self.capture.log.steps:
            return None
        self.read_clocks()
        everyone = gather(self.capture.log)
        numbers: list = [None]
        if everyone:
            clocks = [Clock(first, last) for first, last in zip(*self._clocks, strict=True)]
            self._timeline = assemble(self._title, secrets.token_hex(8), everyone, clocks)
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
        with collector_off():
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
    moved = [shifted(log, clock.to_first_rank) for log, clock in zip(everyone, clocks, strict=True)]
    zero = min(start for log in moved for _, (start, _) in log.steps)
    moved = [shifted(log, lambda seconds: seconds - zero) for log in moved]
    errors = sorted(log.error + clock.error for log, clock in zip(everyone, clocks, strict=True))
    if moved[0].partitions:
        return timeline_of_threads(title, run, moved[0])
    calls = by_key([log.messages for log in moved])
    steps = [Step(log.rank, number, *span) for log in moved for number, span in log.steps]
    boxes = [box for log in moved for box in [*process_boxes(log), *network_boxes(log, calls)]]
    error = sum(errors[-2:]) if len(moved) > 1 else 0.0
    on_gpu = any(log.on_gpu for log in moved)
    notes = (ON_GPU,) if on_gpu else ()
    return Timeline(title, len(moved), tuple(steps), tuple(boxes), error, notes=notes, run=run, on_gpu=on_gpu)


def shifted(log: RankLog, to: Callable[[float], float]) -> RankLog:
    """Return the same with every time converted by `to`."""

    def moved(part):
        return replace(part, start=to(part.start), end=to(part.end))

    def spans(pairs: list) -> list:
        return [(name, (to(start), to(end))) for name, (start, end) in pairs]

    return RankLog(
        log.rank, spans(log.steps), spans(log.phases), spans(log.micro_batches),
        [moved(box) for box in log.partitions], [moved(message) for message in log.messages],
        [moved(part) for part in log.blocked], [(to(start), to(end)) for start, end in log.own_code],
        log.error, log.on_gpu,
    )  # fmt: skip


def process_boxes(log: RankLog) -> list[Box]:
    """The boxes on a rank's row "process": its phases, cut where it was blocked; there it communicates.

    The phase communication is cut where the process ran its own code: that is averaging.
    """
    blocked = merged((part.start, part.end) for part in log.blocked)
    of_pipeline = [span for _, span in log.micro_batches]
    boxes = []
    for name, span in log.phases:
        holes = log.own_code if name == "communication" else [*blocked, *of_pipeline]
        boxes += [(name, rest) for rest in without([span], holes)]
    for name, span in [*log.micro_batches, *(("pipeline", span) for span in _between_micro_batches(log))]:
        boxes += [(name, rest) for rest in without([span], blocked)]
    in_phase = [span for name, span in log.phases if name == "communication"]
    boxes += [("communication", span) for span in without(blocked, in_phase)]
    boxes += [("averaging", span) for span in log.own_code]
    return [Box(log.rank, "process", name, *span) for name, span in sorted(boxes, key=lambda box: box[1])]


def _between_micro_batches(log: RankLog) -> list[Span]:
    """Return what a pipeline does in a step outside of its micro-batches, and outside of all phases."""
    spans = []
    for _, limits in log.steps:
        inside = within([span for _, span in log.micro_batches], limits)
        if inside:
            after = [span[0] for name, span in log.phases if name == "optimizer" and limits[0] <= span[0] < limits[1]]
            whole = (min(start for start, _ in inside), min(after, default=max(end for _, end in inside)))
            spans += without([whole], [*inside, *(span for _, span in log.phases)])
    return spans


def network_boxes(log: RankLog, calls: dict[tuple, dict[int, Message]]) -> list[Box]:
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
    count = 1 + max(box.partition for box in log.partitions)
    boxes = [box for phase in log.phases for box in _caller_boxes(phase, log.partitions)]
    for partition in range(count):
        of_partition = [box for box in log.partitions if box.partition == partition]
        for _, limits in log.steps:
            boxes += _partition_boxes(partition, count, of_partition, limits)
    labels = ("caller", *(f"part. {partition}" for partition in range(count)))
    steps = [Step(row, number, *span) for row in range(count + 1) for number, span in log.steps]
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
    with_waits: list[Box] = []
    idle_from = limits[0]
    own = sorted((box for box in boxes if limits[0] <= box.start < limits[1]), key=lambda box: box.start)
    for box in own:
        source = partition - 1 if box.name.startswith("forward") else partition + 1
        row = CALLER if source in (-1, count) else 1 + source
        waits = [Wait(idle_from, box.start, row)]
        if box is own[-1]:
            waits.append(Wait(box.end, limits[1], CALLER))
        with_waits.append(Box(1 + partition, "process", box.name, box.start, box.end, waits=tuple(waits)))
        idle_from = box.end
    return with_waits
