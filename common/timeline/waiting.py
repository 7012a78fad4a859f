"""Finds when a rank was blocked, by which message, and for which rank it waited.

A process is blocked by a message if it computes nothing while the message is under way, and continues when the message
is complete. While a bucket of gradients travels and backward computes, the process is not blocked.

A blocked rank waits until the last rank that it needs has entered the same collective. From then on, it communicates.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from common.timeline.boxes import Wait
from common.timeline.spans import Span, merged, spans_of, within, without

# A process may continue before gloo's thread has noted the end of the message: usually by less than SLACK seconds, on a
# busy machine by up to MOST_SLACK. A delay is at most this SHARE of the time in which the process did nothing.
SLACK, MOST_SLACK, SHARE = 1e-4, 5e-3, 0.05
LONG = 0.01  # seconds, longer than a process waits for a core that another one has
PYTHON = 5e-4  # a process that has computed while its message travelled is blocked if it does nothing for longer


@dataclass(frozen=True)
class WaitMessage:
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


def blocked(limits: Span, busy: Sequence[Span], messages: Sequence[WaitMessage]) -> list[Blocked]:
    """Return the spans inside `limits` in which a process that computes during `busy` was blocked."""
    spans = []
    in_order = sorted(range(len(messages)), key=lambda i: messages[i].end)
    ends = [messages[i].end for i in in_order]
    for start, end in without([limits], within(merged(busy), limits)):
        slack = min(MOST_SLACK, max(SLACK, SHARE * (end - start)))
        for i in in_order[bisect_right(ends, start) : bisect_right(ends, end + slack)]:
            begin, until = max(start, messages[i].start), min(messages[i].end, end)
            least = PYTHON if messages[i].start < start and end < limits[1] else 0.0
            if until - begin > least:
                spans.append(Blocked(begin, until, i))
                start = until  # then it waits for the message that is complete next
    return spans


def own_code(phases: Sequence[Span], busy: Sequence[Span], held: Sequence[Blocked]) -> list[Span]:
    """Return when a process ran its own code in these phases, which are meant for communication.

    It did where no message blocked it and torch computed, or where nothing blocked it for a long time. In a short time
    without a message, it waits for a core or calls the next collective; that belongs to the communication.
    """
    free = without(phases, spans_of(held))
    long = [span for span in free if span[1] - span[0] >= LONG]
    torch = [part for span in free for part in within(merged(busy), span) if part[1] - part[0] >= PYTHON]
    return merged([*long, *torch])


def by_key(everyone: Sequence[Sequence[WaitMessage]]) -> dict[tuple, dict[int, WaitMessage]]:
    """Return every message by its key and by the ranks that take part; `everyone` has the messages of each rank."""
    calls: dict[tuple, dict[int, WaitMessage]] = defaultdict(dict)
    for rank, messages in enumerate(everyone):
        for key, message in zip(keys(rank, messages), messages, strict=True):
            calls[key].setdefault(rank, message)
    return calls


def root_of(message: WaitMessage, members: dict[int, WaitMessage]) -> int:
    """Return the root of a collective, -1 if it has none; torch counts it within the group."""
    has_root = message.name in ("gather", "reduce", "scatter", "broadcast") and message.other < len(members)
    return sorted(members)[message.other] if has_root else -1


def delivered(rank: int, message: WaitMessage, members: dict[int, WaitMessage]) -> float:
    """Return the time at which the last rank has received what `rank` has sent with this message.

    gloo notes the end of a send when the sender asks for it. For the root of a scatter or a broadcast, it notes when
    the system has taken the bytes, of which many may still be in front of the link.
    """
    others = [other.end for number, other in members.items() if number != rank]
    if message.name == "send" and others:
        return max(message.start, min(message.end, *others))
    return max(message.end, *others) if others and spreads(rank, message, members) else message.end


def spreads(rank: int, message: WaitMessage, members: dict[int, WaitMessage]) -> bool:
    """Return whether the rank is the root that sends to all others."""
    return message.name in ("scatter", "broadcast") and root_of(message, members) == rank


def waits(
    rank: int, message: WaitMessage, members: dict[int, WaitMessage], span: Blocked, deliveries: Sequence[Span]
) -> list[Wait]:
    """Return the spans in which a rank waited for another one while it was blocked; an empty list if all were there.

    members: this message on every rank. deliveries: when all ranks were there to receive what this rank had sent to
    them before. A rank that is still receiving cannot arrive yet; until then, this rank counts as communicating.
    """
    others, root = members.keys() - {rank}, root_of(message, members)
    if root not in (-1, rank):
        others &= {root}
    late = [(members[other].start, other) for other in others if members[other].start > span.start]
    if not late:
        return []
    arrived, last = max(late)
    return [Wait(*rest, last) for rest in without([(span.start, min(arrived, span.end))], deliveries)]


def keys(rank: int, messages: Sequence[WaitMessage]) -> list[tuple]:
    """Return what the calls of one collective, or a send and its recv, have in common."""
    counts: dict[tuple, int] = defaultdict(int)
    message_keys: list[tuple] = []
    for message in messages:
        if message.name not in ("send", "recv"):
            message_keys.append((message.group, message.number))
            continue
        ends = (rank, message.other) if message.name == "send" else (message.other, rank)
        message_keys.append(("send", *ends, counts[ends]))
        counts[ends] += 1
    return message_keys
