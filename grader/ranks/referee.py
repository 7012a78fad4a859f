"""A referee for partitions that must work at the same time, in the grader's process, where no student's code runs.

    rank, worker of partition j    ── the place, what the partition was given and what it made of it ──>    referee
                                   <── a permit ── as soon as a worker waits at every place of its group

A partition's result is multiplied by its permit, a number that was drawn for this place and that no rank has. So who
does not bring a whole clock cycle at once, each partition with its own input and with what it has made of it, gets no
permits, and no values that the judge finds right. Which thread asks is only what the rank says: it explains an honest
mistake. That each partition works in a thread of its own is shown by thread_times.py, where a judge asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from grader.ranks.thread_times import ThreadTimes
from grader.wire.values import MessageError

CONTENT = 12  # numbers of a partition's input, and of its result, that go with its arrival
MAIN = 0  # the thread that calls the pipe
NO_PERMIT = 1.0  # changes nothing, where a permit was to be
Place = tuple[int, int, int]  # call, micro-batch, partition
Answers = list[tuple[int, Any]]  # numbers of asks, and what they are answered


class Referee(Protocol):
    """What answers a rank's asks in a run; it is in the run's Result. It believes nothing about a message."""

    def started(self, pids: Sequence[int]) -> None:
        """Take the ranks' process ids, before any of them can ask."""

    def ask(self, message: dict) -> Answers:
        """Take an ask; the answers that can be given now. Raises MessageError for what no rank of ours sends."""


@dataclass
class PermitReferee:
    """Hands out `permits` (calls, micro-batches, partitions), each group's at once. A place without a group is alone.

    `arrivals` are the places that were there, with the beginning of their inputs, and `made` with that of their results
    before the permit; `faults` say who came otherwise. With `threads`, each place pays for its permit, in its turn.
    """

    permits: np.ndarray
    groups: Sequence[Sequence[Sequence[int]]]
    threads: ThreadTimes | None = None
    arrivals: dict[Place, np.ndarray] = field(default_factory=dict)
    made: dict[Place, np.ndarray] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _begun: dict[Place, int] = field(default_factory=dict)  # place -> number of the ask that begins its turn
    _waiting: dict[Place, tuple[int, int]] = field(default_factory=dict)  # place -> thread, number of the ask
    _partition_of: dict[int, int] = field(default_factory=dict)  # thread -> partition
    _worker_of: dict[int, int] = field(default_factory=dict)  # partition -> thread

    def started(self, pids: Sequence[int]) -> None:
        if self.threads:
            self.threads.pid = pids[0]

    def ask(self, message: dict) -> Answers:
        """What Permits sends, see permits."""
        thread, number = int(message["thread"]), int(message["id"])
        call, i, j = (int(at) for at in message["place"])
        if message["what"] == "begin":
            return self._begin((call, i, j), number)
        if any(thread == waiting for waiting, _ in self._waiting.values()):
            raise MessageError("a thread asks for a permit while it waits for another one")
        if not all(0 <= at < count for at, count in zip((call, i, j), self.permits.shape, strict=True)):
            return [(number, NO_PERMIT)]
        if fault := self._fault((call, i, j), thread):
            self.faults.append(fault)
            return [(number, NO_PERMIT), *self._next_turn()]
        self.arrivals[call, i, j] = np.ravel(np.asarray(message["content"], np.float64))[:CONTENT]
        self.made[call, i, j] = np.ravel(np.asarray(message["made"], np.float64))[:CONTENT]
        self._waiting[call, i, j] = thread, number
        if self.threads:
            self.threads.end((call, i, j), self.arrivals[call, i, j], message["digest"])
        turn = self._next_turn()
        group = self._group((call, i, j))
        if not self._waiting.keys() >= set(group):
            return turn
        return turn + [(self._waiting.pop(place)[1], float(self.permits[place])) for place in group]

    def _group(self, place: Place) -> list[Place]:
        call, i, j = place
        return next(([(call, m, n) for m, n in group] for group in self.groups if [i, j] in group), [place])

    def _begin(self, place: Place, number: int) -> Answers:
        """A place has begun. Once all of its group have, they get their tokens, one after the other."""
        if not self.threads:
            return [(number, "")]
        self._begun[place] = number
        return self._next_turn() if self._begun.keys() >= set(self._group(place)) else []

    def _next_turn(self) -> Answers:
        if not self.threads or not self._begun:
            return []
        return [(self._begun.pop(next(iter(self._begun))), self.threads.begin())]

    def _fault(self, place: Place, thread: int) -> str:
        """Why this is no worker of this partition, or no new place; "" if it is both."""
        j = place[2]
        if thread == MAIN:
            return f"partition {j} runs in the caller's thread"
        if place in self._waiting:
            return f"partition {j} runs twice on micro-batch {place[1]} at the same time"
        if (other := self._partition_of.setdefault(thread, j)) != j:
            return f"partitions {other} and {j} run in one thread: each needs its own worker"
        if self._worker_of.setdefault(j, thread) != thread:
            return f"partition {j} runs in several threads: it has one worker, behind in_queues[{j}]"
        return ""
