"""Stages and queues that report what a student's Pipe does with them; sent to ranks as source, see grader/in_rank.py.

    caller ── put ──> WatchedInQueue ── WatchedTask ──> worker: WatchedStage ──> WatchedOutQueue ── get ──> caller

A WatchedStage can wait in its forward() until other stages are in their forward(). Progress counts tasks and results,
and decides from these counts alone, never by time, whether another stage can still arrive and whether a get() can still
return. So a slow machine and a fast one give the same verdict.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:  # what it finds in a rank
    from grader.inside.context import Context

Place = tuple[int, int]  # (micro-batch, partition)
REFUSALS = 25  # how often a caller that does not wait is refused the result of a slow partition
POLLS, ENDLESS = 50, 1000  # failed looks for a result after which the caller counts as waiting, and as endless


class NeverArrives(BaseException):
    """The caller waits for a result that no task can produce. A BaseException, so that compute() does not handle it."""


class Progress:
    """Counts of the tasks that each queue got and finished and of the results taken from it, and who waits where."""

    def __init__(self) -> None:
        self.put: Counter[int] = Counter()
        self.done: Counter[int] = Counter()  # finished, successfully or not; the result follows at once
        self.taken: Counter[int] = Counter()
        self.inside: dict[Place, int | None] = {}  # stage that waits for others -> the queue of its worker
        self.waits_for: int | None = None  # the queue whose next result the caller waits for
        self.polls = 0
        self.unwatched = False  # tasks may bypass the counts: then decide nothing

    def quiet(self) -> bool:
        """Return whether every worker is idle or waits inside a stage."""
        return all(self.put[j] == self.done[j] or j in self.inside.values() for j in self.put)

    def ready(self, j: int) -> bool:
        """Return whether a result is in out-queue j, or about to be."""
        return self.done[j] > self.taken[j]

    def nobody_else_arrives(self) -> bool:
        """Return whether no other stage can start until a waiting one ends: all workers and the caller wait."""
        if self.waits_for is not None:
            caller_waits = not self.ready(self.waits_for)
        else:
            caller_waits = self.polls >= POLLS and not any(map(self.ready, self.put))
        return not self.unwatched and self.quiet() and caller_waits

    def hopeless(self, j: int) -> bool:
        """Return whether a get() from out-queue j waits forever: no task is left, and no result is in it."""
        return not self.unwatched and not self.ready(j) and self.put == self.done


def give_schedule(module: Any, given: Any) -> None:
    """Replace _clock_cycles of a module for the numbers of micro-batches and partitions that are given."""
    table = {(m, n): [[(i, j) for i, j in cycle] for cycle in cycles] for m, n, cycles in given}
    own = module._clock_cycles

    def given_cycles(num_batches: int, num_partitions: int) -> Iterator[list[Place]]:
        """Return the given schedule, under the names of the region's own function: calls may use them."""
        size = num_batches, num_partitions
        return iter(table[size]) if size in table else own(*size)

    module._clock_cycles = given_cycles


def live_tensors() -> int:
    """Return how many tensors are in memory."""
    gc.collect()
    return sum(isinstance(one, Tensor) for one in gc.get_objects())


class PipeWatch:
    """All that is watched in one pipe.

    groups: places that must be computed at the same time; slow: the first looks for a result find none.
    """

    def __init__(self, context: Context, groups: Iterable[Iterable[Sequence[int]]] = (), slow: bool = False) -> None:
        self.tell, self.patience, self.slow = context.event, context.arguments["patience"], slow
        self.groups = [{(int(i), int(j)) for i, j in group} for group in groups]
        self.changed = threading.Condition()
        self.progress = Progress()
        self.present, self.met = set[Place](), set[Place]()  # places that run now; places whose whole group ran
        self.over = False  # a stage has waited in vain: no stage waits any more
        self.queue_of: dict[int, int] = {}  # thread -> the queue whose task it computes
        # (queue, number of the result): those the caller has asked for; how often a look found none
        self.asked, self.refused = set[tuple[int, int]](), Counter[tuple[int, int]]()

    def enter(self, place: Place) -> None:
        """Wait until all of this place's group are present, or it is certain that they will not be."""
        group = next((group for group in self.groups if place in group), {place})
        in_caller = threading.current_thread() is threading.main_thread()

        def decided() -> bool:
            return place in self.met or self.over or in_caller or self.progress.nobody_else_arrives()

        self.tell("present", place=place)
        with self.changed:
            self.present.add(place)
            if group <= self.present:
                self._let_go(group)
            if place in self.met:
                return
            self.progress.inside[place] = self.queue_of.get(threading.get_ident())
            self.changed.notify_all()
            self.changed.wait_for(decided, self.patience)
            if place not in self.met:
                self.over = True
                self.tell("alone", place=place, missing=sorted(group - self.present))
                self._let_go({*self.progress.inside})

    def _let_go(self, places: set[Place]) -> None:
        """Note that these places do not wait any more. A count that is made before they wake up must know it."""
        if not self.over:
            self.met |= places
        for place in places:
            self.progress.inside.pop(place, None)
        self.changed.notify_all()

    def leave(self, place: Place) -> None:
        self.tell("left", place=place)
        with self.changed:
            self.present.discard(place)
            self.changed.notify_all()

    def count(self, counter: Counter[int], j: int) -> None:
        """Count a task that was put into queue j or is done, or a result that was taken from it."""
        with self.changed:
            counter[j] += 1
            self.progress.polls = 0
            self.changed.notify_all()

    def wait_for_result(self, j: int) -> None:
        """Return when out-queue j has a result and all workers are idle or in a stage. Raises NeverArrives."""
        progress, result = self.progress, (j, self.progress.taken[j])
        if result not in self.asked:
            self.asked.add(result)
            self.tell("get", partition=j)

        def decided() -> bool:
            return progress.hopeless(j) or progress.unwatched or (progress.ready(j) and progress.quiet())

        with self.changed:
            progress.waits_for = j
            self.changed.notify_all()
            self.changed.wait_for(decided)
            progress.waits_for = None
            if progress.hopeless(j):
                raise NeverArrives

    def look(self, j: int) -> bool:
        """Return whether a caller that does not wait finds a result in out-queue j. A slow one is refused at first.

        "gave_up" is reported once for each result. Looks in vain are counted: after POLLS of them the caller counts as
        waiting, and after ENDLESS it gets NeverArrives if no result can come.
        """
        result = (j, self.progress.taken[j])
        with self.changed:
            if self.progress.ready(j) and (not self.slow or self.refused[result] >= REFUSALS):
                return True
            if not self.refused[result]:
                self.tell("gave_up", partition=j)
            self.refused[result] += 1
            self.progress.polls += 1
            if self.progress.polls > ENDLESS and self.progress.hopeless(j):
                raise NeverArrives
            self.changed.notify_all()
            self.changed.wait(0.002)
            return False


class WatchedStage(nn.Module):
    """A partition's only layer. It reports every call. Column 0 of x has the examples' numbers.

    compute: what it does with x; its parameters, if it has some, are those of this layer.
    """

    def __init__(self, watch: PipeWatch, partition: int, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.watch, self.partition, self.compute = watch, partition, compute
        self.error: BaseException | None = None  # what is raised instead of computing
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Report the call, wait for the stage's group, and compute, or raise `error`."""
        marks = [-1] if x.device.type == "meta" else [int(mark) for mark in x.detach().flatten(1)[:, 0]]
        place = (marks[0] if marks else -1, self.partition)
        in_caller = threading.current_thread() is threading.main_thread()
        self.calls += 1
        self.watch.tell("enter", place=place, marks=marks, device=str(x.device), in_caller=in_caller)
        self.watch.enter(place)
        try:
            if self.error is not None:
                raise self.error
            return self.compute(x)
        finally:
            self.watch.leave(place)


class WatchedTask:
    """Replaces a Task in a worker, and counts it when it is done."""

    def __init__(self, watch: PipeWatch, task: Any, worker: int) -> None:
        self._watch, self._task, self._worker = watch, task, worker

    def compute(self) -> object:
        task, self._task = self._task, None
        self._watch.queue_of[threading.get_ident()] = self._worker
        try:
            return task.compute()
        finally:
            self._watch.count(self._watch.progress.done, self._worker)


class WatchedQueue:
    """Replaces a queue of a worker. `held`: tasks that wait until the caller begins to collect results.

    So a task that reads the variables of a loop when it runs never finds the values it was created with by luck.
    """

    def __init__(self, original: queue.Queue, number: int, watch: PipeWatch, held: list) -> None:
        self._original, self._number, self._watch, self._held = original, number, watch, held

    def _release(self) -> None:
        tasks, self._held[:] = self._held[:], []
        for original, task in tasks:
            original.put(task)

    def __getattr__(self, name: str) -> object:
        self._release()
        self._watch.progress.unwatched = True
        return getattr(self._original, name)


class WatchedInQueue(WatchedQueue):
    def put(self, task: object) -> None:
        if task is not None:
            self._watch.tell("put", partition=self._number)
            self._watch.count(self._watch.progress.put, self._number)
            task = WatchedTask(self._watch, task, self._number)
        self._held.append((self._original, task))


class WatchedOutQueue(WatchedQueue):
    """Reports that the caller waits, and raises instead of waiting for a result that cannot arrive."""

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        """Return the next result; raise queue.Empty or NeverArrives instead of waiting in vain."""
        self._release()
        limited = not block or timeout is not None
        if limited and (self._watch.slow or not block) and not self._watch.look(self._number):
            raise queue.Empty
        try:
            self._watch.wait_for_result(self._number)
        except NeverArrives:
            if limited and not self._watch.look(self._number):
                raise queue.Empty from None
            raise
        result = self._original.get()
        self._watch.count(self._watch.progress.taken, self._number)
        return result

    def get_nowait(self) -> object:
        return self.get(block=False)

    def empty(self) -> bool:
        self._release()
        return not self._watch.look(self._number)


def watch_queues(pipe: Any, watch: PipeWatch) -> None:
    """Put a watched queue in front of every queue of a pipe."""
    held: list = []
    pipe.in_queues = [WatchedInQueue(queue, j, watch, held) for j, queue in enumerate(pipe.in_queues)]
    pipe.out_queues = [WatchedOutQueue(queue, j, watch, held) for j, queue in enumerate(pipe.out_queues)]
