"""Combines what the ranks recorded into one timeline, on rank 0's clock.

Call it after the measurement: it communicates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from common.timeline.boxes import Box, Step, Timeline, Wait
from common.timeline.capture import SeenOnRank
from common.timeline.clocks import Clock
from common.timeline.spans import Span, merged, within, without
from common.timeline.threads import timeline_of_threads
from common.timeline.waiting import Message, by_key, delivered, keys, spreads, waits

ON_GPU = "on GPUs, the end of a collective is not measured: its box ends when it is queued"


def gather(seen: SeenOnRank) -> list[SeenOnRank]:
    """Return on rank 0 what every rank saw, and an empty list on the others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [seen]
    everyone = [seen] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(seen, everyone)
    return everyone or []


def assemble(title: str, run: str, everyone: Sequence[SeenOnRank], clocks: Sequence[Clock]) -> Timeline:
    """Return the timeline of all ranks. clocks: one for each rank."""
    moved = [shifted(seen, clock.to_first_rank) for seen, clock in zip(everyone, clocks, strict=True)]
    zero = min(start for seen in moved for _, (start, _) in seen.steps)
    moved = [shifted(seen, lambda seconds: seconds - zero) for seen in moved]
    errors = sorted(seen.error + clock.error for seen, clock in zip(everyone, clocks, strict=True))
    if moved[0].partitions:
        return timeline_of_threads(title, run, moved[0])
    calls = by_key([seen.messages for seen in moved])
    steps = [Step(seen.rank, number, *span) for seen in moved for number, span in seen.steps]
    boxes = [box for seen in moved for box in [*process_boxes(seen), *network_boxes(seen, calls)]]
    error = sum(errors[-2:]) if len(moved) > 1 else 0.0
    on_gpu = any(seen.on_gpu for seen in moved)
    notes = (ON_GPU,) if on_gpu else ()
    return Timeline(title, len(moved), tuple(steps), tuple(boxes), error, notes=notes, run=run, on_gpu=on_gpu)


def shifted(seen: SeenOnRank, to: Callable[[float], float]) -> SeenOnRank:
    """Return the same with every time converted by `to`."""

    def moved(part):
        return replace(part, start=to(part.start), end=to(part.end))

    def spans(named: list) -> list:
        return [(name, (to(start), to(end))) for name, (start, end) in named]

    return SeenOnRank(
        seen.rank, spans(seen.steps), spans(seen.phases), spans(seen.micro_batches),
        [moved(box) for box in seen.partitions], [moved(message) for message in seen.messages],
        [moved(part) for part in seen.blocked], [(to(start), to(end)) for start, end in seen.own_code],
        seen.error, seen.on_gpu,
    )  # fmt: skip


def process_boxes(seen: SeenOnRank) -> list[Box]:
    """The boxes on a rank's row "process": its phases, cut where it was blocked; there it communicates.

    The phase communication is cut where the process ran its own code: that is averaging.
    """
    blocked = merged((part.start, part.end) for part in seen.blocked)
    of_pipeline = [span for _, span in seen.micro_batches]
    boxes = []
    for name, span in seen.phases:
        holes = seen.own_code if name == "communication" else [*blocked, *of_pipeline]
        boxes += [(name, rest) for rest in without([span], holes)]
    for name, span in [*seen.micro_batches, *(("pipeline", span) for span in _between_micro_batches(seen))]:
        boxes += [(name, rest) for rest in without([span], blocked)]
    in_phase = [span for name, span in seen.phases if name == "communication"]
    boxes += [("communication", span) for span in without(blocked, in_phase)]
    boxes += [("averaging", span) for span in seen.own_code]
    return [Box(seen.rank, "process", name, *span) for name, span in sorted(boxes, key=lambda box: box[1])]


def _between_micro_batches(seen: SeenOnRank) -> list[Span]:
    """Return what a pipeline does in a step outside of its micro-batches, and outside of all phases."""
    found = []
    for _, limits in seen.steps:
        inside = within([span for _, span in seen.micro_batches], limits)
        if inside:
            after = [span[0] for name, span in seen.phases if name == "optimizer" and limits[0] <= span[0] < limits[1]]
            whole = (min(start for start, _ in inside), min(after, default=max(end for _, end in inside)))
            found += without([whole], [*inside, *(span for _, span in seen.phases)])
    return found


def network_boxes(seen: SeenOnRank, calls: dict[tuple, dict[int, Message]]) -> list[Box]:
    """The boxes on a rank's row "network", with the waits of its process. calls: see by_key."""
    members = [calls[key] for key in keys(seen.rank, seen.messages)]
    ends = [delivered(seen.rank, message, of) for message, of in zip(seen.messages, members, strict=True)]
    deliveries = [
        (max(other.start for other in of.values()), end)
        for message, of, end in zip(seen.messages, members, ends, strict=True)
        if spreads(seen.rank, message, of)
    ]
    waited: dict[int, list[Wait]] = {}
    for part in seen.blocked:
        i = part.message
        earlier = within(deliveries, (part.start, part.end))
        waited.setdefault(i, []).extend(waits(seen.rank, seen.messages[i], members[i], part, earlier))
    return [
        Box(seen.rank, "network", message.name, message.start, end, message.bytes, tuple(waited.get(i, ())))
        for i, (message, end) in enumerate(zip(seen.messages, ends, strict=True))
    ]
