"""A referee for partitions that must work at the same time, in the grader's process, where no student's code runs.

    rank, worker of partition j    ── the place, what the partition was given and what it made of it ──>    referee
                                   <── a permit ── as soon as a worker waits at every place of its group

A partition's result is multiplied by its permit, a number that was drawn for this place and that no rank has. Each ask
comes with the thread that waits for its answer; the rank's signature holds it. So nobody needs to believe what a rank
reports of its workers: who does not bring a whole clock cycle at once, each partition in its own thread, with its own
input and with what it has computed there, gets no permits, and no values that the judge finds right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from grader.wire.values import MessageError

CONTENT = 12  # numbers of a partition's input, and of its result, that go with its arrival
MAIN = 0  # the thread that calls the pipe
NO_PERMIT = 1.0  # changes nothing, where a permit was to be
Place = tuple[int, int, int]  # call, micro-batch, partition
Answers = list[tuple[int, Any]]  # numbers of asks, and what they are answered


class Referee(Protocol):
    """What answers a rank's asks in a run; it is in the run's Result. It believes nothing about a message."""

    def ask(self, message: dict) -> Answers:
        """Take an ask; the answers that can be given now. Raises MessageError for what no rank of ours sends."""


@dataclass
class PermitReferee:
    """Hands out `permits` (calls, micro-batches, partitions), each group's at once. A place without a group is alone.

    `arrivals` are the places that were there, with the beginning of their inputs, and `made` with that of their results
    before the permit; `faults` say who came otherwise.
    """

    permits: np.ndarray
    groups: Sequence[Sequence[Sequence[int]]]
    arrivals: dict[Place, np.ndarray] = field(default_factory=dict)
    made: dict[Place, np.ndarray] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _waiting: dict[Place, tuple[int, int]] = field(default_factory=dict)  # place -> thread, number of the ask
    _partition_of: dict[int, int] = field(default_factory=dict)  # thread -> partition
    _worker_of: dict[int, int] = field(default_factory=dict)  # partition -> thread

    def ask(self, message: dict) -> Answers:
        """What Permits.ask sends, see permits."""
        thread, number = int(message["thread"]), int(message["id"])
        call, i, j = (int(at) for at in message["place"])
        if any(thread == waiting for waiting, _ in self._waiting.values()):
            raise MessageError("a thread asks for a permit while it waits for another one")
        if not all(0 <= at < count for at, count in zip((call, i, j), self.permits.shape, strict=True)):
            return [(number, NO_PERMIT)]
        if fault := self._fault((call, i, j), thread):
            self.faults.append(fault)
            return [(number, NO_PERMIT)]
        self.arrivals[call, i, j] = np.ravel(np.asarray(message["content"], np.float64))[:CONTENT]
        self.made[call, i, j] = np.ravel(np.asarray(message["made"], np.float64))[:CONTENT]
        self._waiting[call, i, j] = thread, number
        group = next(([(call, m, n) for m, n in group] for group in self.groups if [i, j] in group), [(call, i, j)])
        if not self._waiting.keys() >= set(group):
            return []
        return [(self._waiting.pop(place)[1], float(self.permits[place])) for place in group]

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
