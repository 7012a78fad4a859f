"""Brings what all ranks saw together: one timeline, on rank 0's clock.

Call it after the measurement: it communicates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from common.timeline.boxes import Box, Step, Timeline, Wait
from common.timeline.capture import Seen
from common.timeline.clocks import Clock
from common.timeline.spans import Span, merged, within, without
from common.timeline.threads import timeline_of_threads
from common.timeline.waiting import arrivals, keys, wait


def gather(seen: Seen) -> list[Seen]:
    """Return on rank 0 what every rank saw, and an empty list on the others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [seen]
    everyone = [seen] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(seen, everyone)
    return everyone or []


def assemble(title: str, run: str, everyone: Sequence[Seen], clocks: Sequence[Clock]) -> Timeline:
    """Return the timeline of all ranks. clocks: one for each rank."""
    moved = [shifted(seen, clock.to_first_rank) for seen, clock in zip(everyone, clocks, strict=True)]
    zero = min(start for seen in moved for _, (start, _) in seen.steps)
    moved = [shifted(seen, lambda seconds: seconds - zero) for seen in moved]
    errors = sorted(seen.error + clock.error for seen, clock in zip(everyone, clocks, strict=True))
    if moved[0].partitions:
        return timeline_of_threads(title, run, moved[0])
    moved = ended_by_recv(moved)
    entered = arrivals([seen.messages for seen in moved])
    steps = [Step(seen.rank, number, *span) for seen in moved for number, span in seen.steps]
    boxes = [box for seen in moved for box in [*process_boxes(seen), *_network_boxes(seen, entered)]]
    return Timeline(title, len(moved), tuple(steps), tuple(boxes), sum(errors[-2:]) if len(moved) > 1 else 0.0, run=run)


def shifted(seen: Seen, to: Callable[[float], float]) -> Seen:
    """Return the same with every time converted by `to`."""

    def moved(part):
        return replace(part, start=to(part.start), end=to(part.end))

    def spans(named: list) -> list:
        return [(name, (to(start), to(end))) for name, (start, end) in named]

    return Seen(
        seen.rank, spans(seen.steps), spans(seen.phases), spans(seen.micro_batches),
        [moved(box) for box in seen.partitions], [moved(message) for message in seen.messages],
        [moved(part) for part in seen.blocked], seen.error,
    )  # fmt: skip


def ended_by_recv(everyone: Sequence[Seen]) -> list[Seen]:
    """Return the same with sends that end with their recv: gloo notes the end of a send when the sender asks for it."""
    calls = [list(zip(keys(seen.rank, seen.messages), seen.messages, strict=True)) for seen in everyone]
    received = {key: message.end for of_rank in calls for key, message in of_rank if message.name == "recv"}
    found = []
    for seen, of_rank in zip(everyone, calls, strict=True):
        messages = [
            replace(message, end=max(message.start, min(message.end, received[key])))
            if message.name == "send" and key in received
            else message
            for key, message in of_rank
        ]
        found.append(replace(seen, messages=messages))
    return found


def process_boxes(seen: Seen) -> list[Box]:
    """The boxes on a rank's row "process": its phases, cut where it was blocked; there it communicates."""
    blocked = merged((part.start, part.end) for part in seen.blocked)
    of_pipeline = [span for _, span in seen.micro_batches]
    boxes = []
    for name, span in seen.phases:
        holes = [] if name == "communication" else [*blocked, *of_pipeline]
        boxes += [(name, rest) for rest in without([span], holes)]
    for name, span in [*seen.micro_batches, *(("pipeline", span) for span in _between_micro_batches(seen))]:
        boxes += [(name, rest) for rest in without([span], blocked)]
    in_phase = [span for name, span in seen.phases if name == "communication"]
    boxes += [("communication", span) for span in without(blocked, in_phase)]
    return [Box(seen.rank, "process", name, *span) for name, span in sorted(boxes, key=lambda box: box[1])]


def _between_micro_batches(seen: Seen) -> list[Span]:
    """What a pipeline does in a step outside of its micro-batches, and outside of all phases."""
    found = []
    for _, limits in seen.steps:
        inside = within([span for _, span in seen.micro_batches], limits)
        if inside:
            after = [span[0] for name, span in seen.phases if name == "optimizer" and limits[0] <= span[0] < limits[1]]
            whole = (min(start for start, _ in inside), min(after, default=max(end for _, end in inside)))
            found += without([whole], [*inside, *(span for _, span in seen.phases)])
    return found


def _network_boxes(seen: Seen, entered: dict[tuple, dict[int, float]]) -> list[Box]:
    """The boxes on a rank's row "network", with the waits of its process."""
    found_keys = keys(seen.rank, seen.messages)
    waits: dict[int, list[Wait]] = {}
    for part in seen.blocked:
        found = wait(seen.rank, seen.messages[part.message], entered[found_keys[part.message]], part)
        if found:
            waits.setdefault(part.message, []).append(found)
    return [
        Box(seen.rank, "network", message.name, message.start, message.end, message.bytes, tuple(waits.get(i, ())))
        for i, message in enumerate(seen.messages)
    ]
