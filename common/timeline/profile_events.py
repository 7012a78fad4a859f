"""Reads what torch.profiler has seen of some steps: when torch computed, and every collective of this rank.

The profiler sees a collective twice: `c10d::allreduce_` is when this rank enters it, and `gloo:all_reduce` ends when it
is complete. The second runs in a thread of gloo's own, so the first to start belongs to the first call.
"""

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.timeline.spans import Span, merged
from common.timeline.waiting import WaitMessage
from common.workers.collectives import element_bytes

# Operators that compute. Those of autograd and of the pipeline enclose others, and waits as well.
COMPUTES = ("aten::", "torch::distributed::reducer::", "torch.distributed.ddp.reducer::")
NAMES = {
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
OTHER_AT = {"gather": 3, "scatter": 3, "reduce": 3, "broadcast": 2, "send": 2, "recv": 2}  # the argument: root or peer
# What torch.distributed.pipelining calls the forward and the backward of a micro-batch.
MICRO_BATCH = re.compile(r"(Forward|Backward) (\d+)|PP:\d+(F|B)(\d+)")


@dataclass(frozen=True)
class Profile:
    """The events that the profiler has seen, in seconds of time.time().

    busy: when torch computed. micro_batches: (name, span), such as "forward 2", of torch's pipeline schedules.
    """

    busy: list[Span]
    messages: list[WaitMessage]
    micro_batches: list[tuple[str, Span]]


def read_profile(path: Path) -> Profile:
    """Return what is in a trace of torch.profiler."""
    trace = json.loads(path.read_text())
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "ts" in e]
    events.sort(key=lambda event: event["ts"])

    def span(event: dict) -> Span:
        start = trace["baseTimeNanoseconds"] / 1e9 + event["ts"] / 1e6
        return start, start + event["dur"] / 1e6

    busy = merged(span(event) for event in events if event["name"].startswith(COMPUTES))
    micro_batches = [(name, span(event)) for event in events if (name := _micro_batch(event["name"]))]
    return Profile(busy, _messages(events, span), micro_batches)


def _messages(events: Sequence[dict], span: Callable[[dict], Span]) -> list[WaitMessage]:
    calls = _outermost([event for event in events if event["name"].startswith("c10d::")])
    ends: dict[str, deque[dict]] = defaultdict(deque)
    for event in events:
        backend, _, name = event["name"].partition(":")
        if backend in ("gloo", "nccl"):
            ends[name].append(event)
    messages = []
    for call in calls:
        name = _name(call["name"])
        backend_event = ends[name].popleft() if ends[name] else call
        arguments = call["args"].get("Concrete Inputs", [])
        other = arguments[OTHER_AT[name]] if name in OTHER_AT and len(arguments) > OTHER_AT[name] else ""
        start, end = span(call)[0], span(backend_event)[1]
        messages.append(
            WaitMessage(name, start, end, _bytes(backend_event), other=int(other) if other.isdecimal() else -1)
        )
    return messages


def _outermost(calls: Sequence[dict]) -> list[dict]:
    """Return the calls without those inside another one of the same name: a dispatch mode calls an operator again."""
    outermost: list[dict] = []
    ends: dict[tuple, float] = {}  # of the last call with this name in this thread
    for call in calls:
        key = call["name"], call["tid"]
        if call["ts"] >= ends.get(key, 0.0):
            outermost.append(call)
            ends[key] = call["ts"] + call["dur"]
    return outermost


def _name(operator: str) -> str:
    """Return "all_reduce" for "c10d::allreduce_"."""
    name = operator.removeprefix("c10d::").strip("_")
    return next((ours for start, ours in NAMES.items() if name.startswith(start)), name)


def _bytes(event: dict) -> int:
    """Return the size of the tensors that this rank passed in; of a recv, of what it received."""
    pairs = zip(event["args"].get("Input Dims", []), event["args"].get("Input type", []), strict=False)
    # element_bytes is 0 for what is no tensor: a list, whose shape is a list of shapes, or a flag
    return sum(math.prod(shape) * size for shape, kind in pairs if (size := element_bytes(kind)))


def _micro_batch(name: str) -> str:
    match = MICRO_BATCH.fullmatch(name)
    if not match:
        return ""
    word, number = match[1] or {"F": "Forward", "B": "Backward"}[match[3]], match[2] or match[4]
    return f"{word.lower()} {number}"


def numbered(messages: Sequence[WaitMessage], recorded: Sequence[tuple[str, int]]) -> list[WaitMessage]:
    """Return the messages with group and number, so that the calls of different ranks can be matched.

    recorded: (group, number) of the last collectives in torch's flight recorder; if there are too few of them, the
    collectives are counted, as if there were only one group.
    """
    collectives = [i for i, message in enumerate(messages) if message.name not in ("send", "recv")]
    last = list(recorded)[-len(collectives) :] if collectives else []
    if len(last) < len(collectives):
        last = [("", number) for number in range(len(collectives))]
    of_call = dict(zip(collectives, last, strict=True))
    return [
        replace(message, group=of_call[i][0], number=of_call[i][1]) if i in of_call else message
        for i, message in enumerate(messages)
    ]
