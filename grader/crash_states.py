"""Every content of a storage that a crash can leave, computed from one run.

Each rank has changed the storage in an order of its own, by puts and deletes. Between ranks, two orders are certain:

- a rank leaves a collective after those whose part it needs have called it. A barrier needs all ranks, a broadcast only
  its root;
- a rank that reads comes after the changes that it has read.

A crash of one rank or of all stops every rank after some change of its own. What has happened then is a consistent cut:
with each change, also all changes that come before it. There are few of them, since a save waits for all ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grader.ranks.calls import STORAGE, Call
from grader.ranks.outcome import Result

MAX_CUTS = 20_000  # a right program has some hundreds; of more, those that are found first are judged
Clock = tuple[int, ...]  # for each rank, how many of its changes have happened
Content = Mapping[str, bytes]


@dataclass(frozen=True)
class Change:
    """A put, or a delete if there is no value; `before`: what has certainly happened before it."""

    name: str
    value: bytes | None
    before: Clock

    def after(self, content: Content) -> dict[str, bytes]:
        others = {name: value for name, value in content.items() if name != self.name}
        return others if self.value is None else others | {self.name: self.value}


@dataclass(frozen=True)
class CrashState:
    """What a crash can leave, and how many of the events all ranks can have passed then."""

    content: Content
    passed: int


def crash_states(result: Result, event: str, storage: int = 0, start: Content | None = None) -> list[CrashState]:
    """Return every content that a crash of this run can leave in a storage, each once, with the largest `passed`.

    Args:
        event: the name of an event that every rank notes equally often, such as "saved".
        start: what was in the storage at the beginning.
    """
    changes, marks = _happened(result, event, storage)
    found: dict[frozenset, CrashState] = {}
    none = (0,) * len(changes)
    todo: list[tuple[Clock, Content]] = [(none, start or {})]
    seen = {(none, frozenset(todo[0][1].items()))}
    while todo and len(seen) < MAX_CUTS:
        cut, content = todo.pop()
        passed = sum(all(map(int.__le__, mark, cut)) for mark in marks)
        key = frozenset(content.items())
        if key not in found or found[key].passed < passed:
            found[key] = CrashState(content, passed)
        for rank, own in enumerate(changes):
            if cut[rank] < len(own) and all(map(int.__le__, own[cut[rank]].before, cut)):
                further = cut[:rank] + (cut[rank] + 1,) + cut[rank + 1 :]
                changed = own[cut[rank]].after(content)
                if (node := (further, frozenset(changed.items()))) not in seen:
                    seen.add(node)
                    todo.append((further, changed))
    return list(found.values())


def _happened(result: Result, name: str, storage: int) -> tuple[list[list[Change]], list[Clock]]:
    """Return the changes of each rank, and what has happened when all ranks have passed their n-th event `name`."""
    size = len(result.ranks)
    now: list[Clock] = [(0,) * size] * size  # what each rank's next event comes after
    changes: list[list[Change]] = [[] for _ in range(size)]
    marks: list[list[Clock]] = [[] for _ in range(size)]
    posted: dict[tuple, Clock] = {}  # (sequence, number) of a call -> what had happened before it
    written: dict[str, Clock] = {}  # name -> what had happened after its last change
    inside: list[list[Call]] = [[] for _ in range(size)]  # the collectives that a rank has not left yet
    events = [(event, rank, place) for rank in range(size) for place, event in enumerate(result.ranks[rank].events)]
    for event, rank, place in sorted(events, key=lambda item: item[0].arrived):
        for call in [call for call in inside[rank] if call.waited_at is not None and call.waited_at <= place]:
            inside[rank].remove(call)
            for key in _needed(call):
                now[rank] = _later(now[rank], posted.get(key, now[rank]))
        if event.name == name:
            marks[rank].append(now[rank])
        elif isinstance(event, Call) and event.name not in STORAGE:
            posted[event.sequence, event.number] = now[rank]
            inside[rank].append(event)
        elif isinstance(event, Call) and event.data["storage"] == storage:
            key = event.data["key"]
            if event.name in ("get", "list"):
                for other, clock in written.items():
                    if other == key or (event.name == "list" and other.startswith(key)):
                        now[rank] = _later(now[rank], clock)
            elif "full" not in event.data:
                changes[rank].append(Change(key, event.data.get("value"), now[rank]))
                now[rank] = tuple(done + (other == rank) for other, done in enumerate(now[rank]))
                written[key] = _later(written.get(key, now[rank]), now[rank])
    return changes, [tuple(map(max, zip(*clocks, strict=True))) for clocks in zip(*marks, strict=False)]


def _needed(call: Call) -> Iterator[tuple]:
    """Return the calls without which this one cannot return, as (sequence, number)."""
    if call.name == "recv":
        yield call.partner_sequence, call.number
    only_root = call.name in ("broadcast", "scatter")
    for member in () if call.point_to_point or not _waits(call) else (call.root,) if only_root else call.members:
        yield (call.group, member), call.number


def _waits(call: Call) -> bool:
    """Return whether a rank needs others to return: in a gather or reduce, only the root does."""
    return call.name not in ("gather", "reduce") or call.rank == call.root


def _later(one: Clock, other: Clock) -> Clock:
    return tuple(map(max, one, other))
