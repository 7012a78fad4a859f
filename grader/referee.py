"""A referee for partitions that must work at the same time: rank 1, in which no student's code runs. For ranks only.

    rank 0, worker of partition j    ── the place, and what the partition was given ──>    rank 1
                                     <── a permit ── as soon as all of its group wait for theirs

A partition's result is multiplied by its permit, a number that was drawn for this place and that rank 0 does not have.
So nobody needs to believe what a rank reports of its workers: who does not bring a whole clock cycle to the referee,
each partition with its own input, gets no permits, and no values that the judge finds right.
"""

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from grader.wire import CollectiveError

CONTENT = 12  # numbers of a partition's input that go with its arrival
PLACE = 3  # call, micro-batch, partition
REFEREE, ARRIVALS = 1, 0  # the referee's rank; the tag of arrivals, and above it one for each partition's permits
Place = tuple[int, int]  # (micro-batch, partition)


class Permits:
    """Rank 0's way to the referee, for all of its threads. `call` counts the calls of the pipe."""

    def __init__(self, calls: int, micro_batches: int, partitions: int) -> None:
        self.shape, self.call = (calls, micro_batches, partitions), 0
        self._sending = threading.Lock()

    def ask(self, place: Place, x: torch.Tensor) -> float:
        """The permit for this place; waits until all of its group have asked. 1 for a place that there is not."""
        micro_batch, partition = place
        if not all(0 <= at < count for at, count in zip((self.call, *place), self.shape, strict=True)):
            return 1.0
        self._send([self.call, micro_batch, partition], x)
        permit = torch.empty(1, dtype=torch.float64)
        dist.recv(permit, REFEREE, tag=ARRIVALS + 1 + partition)
        return float(permit)

    def end(self) -> None:
        """Nobody comes any more."""
        self._send([-1] * PLACE, torch.empty(0))

    def _send(self, place: Sequence[int], x: torch.Tensor) -> None:
        message = torch.zeros(PLACE + CONTENT, dtype=torch.float64)
        content = x.detach().double().flatten()[:CONTENT]
        message[:PLACE] = torch.tensor(place)
        message[PLACE : PLACE + len(content)] = content
        with self._sending:
            dist.send(message, REFEREE, tag=ARRIVALS)


def judge_arrivals(permits: torch.Tensor, groups: Sequence[Sequence[Sequence[int]]]) -> list[torch.Tensor]:
    """The referee's whole life: hand out `permits` (calls, micro-batches, partitions), each group's at once.

    Returns every arrival: call, micro-batch, partition, and the beginning of its input.
    """
    group_of = {(i, j): [(int(m), int(n)) for m, n in group] for group in groups for i, j in group}
    waiting: set[tuple[int, int, int]] = set()
    arrivals: list[torch.Tensor] = []
    while len(arrivals) <= permits.numel():  # one more, for the word that ends it
        message = torch.empty(PLACE + CONTENT, dtype=torch.float64)
        try:
            dist.recv(message, 0, tag=ARRIVALS)
        except CollectiveError:
            break  # rank 0 is gone: how it ended says why
        call, micro_batch, partition = (int(number) for number in message[:PLACE])
        if call < 0:
            break
        arrivals.append(message)
        waiting.add((call, micro_batch, partition))
        group = [(call, i, j) for i, j in group_of.get((micro_batch, partition), [(micro_batch, partition)])]
        if waiting.issuperset(group):
            for place in group:
                dist.send(permits[place].reshape(1).clone(), 0, tag=ARRIVALS + 1 + place[2])
            waiting.difference_update(group)
    return arrivals
