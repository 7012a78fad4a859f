"""When a rank was blocked, by which message, and for which rank it waited.

A process is blocked by a message if it computes nothing while the message is under way, and goes on when the message is
complete. While a bucket of gradients travels and backward computes, the process is not blocked.

A blocked rank waits until the last rank that it needs has entered the same collective. From then on, it communicates.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from common.timeline.boxes import Wait
from common.timeline.spans import Span, merged, within, without

# A process may go on before gloo's thread has noted the end of the message: usually by less than the first, on a busy
# machine by up to the second. A larger share of what it did nothing is no such delay.
SLACK, MOST_SLACK, SHARE = 1e-4, 5e-3, 0.05
PYTHON = 5e-4  # a process that has computed while its message travelled is blocked if it does nothing for longer


@dataclass(frozen=True)
class Message:
    """A collective, a send or a recv of one rank, from its call until it is complete.

    group, number: the same for all ranks of a collective. other: its root, or the other end of a send; -1 if none.
    """

    name: str
    start: float
    end: float
    bytes: int = 0
    group: str = ""
    number: int = 0
    other: int = -1


@dataclass(frozen=True)
class Blocked:
    """The process did nothing from `start` to `end` but wait for its message number `message` to be complete."""

    start: float
    end: float
    message: int


def blocked(limits: Span, busy: Sequence[Span], messages: Sequence[Message]) -> list[Blocked]:
    """Return when a process that computes during `busy` was blocked, inside `limits`."""
    found = []
    in_order = sorted(range(len(messages)), key=lambda i: messages[i].end)
    ends = [messages[i].end for i in in_order]
    for start, end in without([limits], within(merged(busy), limits)):
        slack = min(MOST_SLACK, max(SLACK, SHARE * (end - start)))
        for i in in_order[bisect_right(ends, start) : bisect_right(ends, end + slack)]:
            begin, until = max(start, messages[i].start), min(messages[i].end, end)
            least = PYTHON if messages[i].start < start and end < limits[1] else 0.0
            if until - begin > least:
                found.append(Blocked(begin, until, i))
                start = until  # then it waits for the message that is complete next
    return found


def arrivals(by_rank: Sequence[Sequence[Message]]) -> dict[tuple, dict[int, float]]:
    """Return for every message when each rank entered it."""
    found: dict[tuple, dict[int, float]] = defaultdict(dict)
    for rank, messages in enumerate(by_rank):
        for message, key in zip(messages, keys(rank, messages), strict=True):
            found[key].setdefault(rank, message.start)
    return found


def keys(rank: int, messages: Sequence[Message]) -> list[tuple]:
    """Return what the calls of one collective, or a send and its recv, have in common."""
    counts: dict[tuple, int] = defaultdict(int)
    found: list[tuple] = []
    for message in messages:
        if message.name not in ("send", "recv"):
            found.append((message.group, message.number))
            continue
        ends = (rank, message.other) if message.name == "send" else (message.other, rank)
        found.append(("send", *ends, counts[ends]))
        counts[ends] += 1
    return found


def wait(rank: int, message: Message, entered: dict[int, float], span: Blocked) -> Wait | None:
    """Return how long the rank waited for another one while it was blocked; None if all were there.

    entered: when each rank entered the message.
    """
    members = sorted(entered)
    others = {other for other in members if other != rank}
    if message.name in ("gather", "reduce", "scatter", "broadcast") and message.other < len(members):
        root = members[message.other]  # torch counts the root within the group
        others = others if rank == root else others & {root}
    late = [(entered[other], other) for other in others if entered[other] > span.start]
    if not late:
        return None
    arrived, last = max(late)
    return Wait(span.start, min(arrived, span.end), last)
