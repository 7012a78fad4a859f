"""Stages and queues that report what a student's Pipe does with them. Used in ranks only.

    caller ── put ──> WatchedInQueue ── WatchedTask ──> worker: WatchedStage ──> WatchedOutQueue ── get ──> caller

A WatchedStage can wait inside its forward until other stages are inside theirs. Progress counts tasks and results, and
decides from these counts alone, never from the clock, whether anybody can still arrive and whether a get() can still
return. So a slow machine and a fast one give the same verdict.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from grader.inside.context import Tell
from grader.probes.pipeline.permits import Permits, is_plain, mode_stacks

Place = tuple[int, int]  # (micro-batch, partition)
REFUSALS = 25  # how often a slow partition's result is not there yet, for a caller that does not wait
POLLS = 50  # failed looks into the queues, with no progress in between, after which the caller counts as waiting
ENDLESS = 1000  # failed looks after which they will never end, once all tasks are finished
POLL_PAUSE = 0.002  # seconds that a failed look costs
LONG_PAUSE = 0.01  # the same where the kernel counts the CPU time of each thread


class NeverArrives(BaseException):
    """The caller waits for a result that no task can produce. No Exception: compute() must not handle it."""


class Progress:
    """How many tasks each queue was given and has finished, how many results were taken, and who waits where."""

    def __init__(self) -> None:
        self.put: Counter[int] = Counter()
        self.done: Counter[int] = Counter()  # finished, successfully or not; the result follows at once
        self.taken: Counter[int] = Counter()
        self.inside: dict[Place, int | None] = {}  # stages that wait for others -> the queue whose worker is in there
        self.waits_for: int | None = None  # the queue whose next result the caller waits for
        self.polls = 0
        self.unwatched = False  # tasks may take a way that is not counted: decide nothing

    def quiet(self) -> bool:
        """Whether every worker is idle or waits inside a stage."""
        return all(self.put[j] == self.done[j] or j in self.inside.values() for j in self.put)

    def ready(self, j: int) -> bool:
        """Whether a result is in out-queue j, or about to be."""
        return self.done[j] > self.taken[j]

    def caller_waits(self) -> bool:
        """Whether the caller can do nothing before a worker finishes another task."""
        if self.waits_for is not None:
            return not self.ready(self.waits_for)
        return self.polls >= POLLS and not any(self.ready(j) for j in self.put)

    def nobody_else_arrives(self) -> bool:
        """Whether no stage will be entered before one that waits is left."""
        return not self.unwatched and self.quiet() and self.caller_waits()

    def hopeless(self, j: int) -> bool:
        """Whether a get() from out-queue j would wait for ever: all tasks are finished, and none of them was for j."""
        return not self.unwatched and not self.ready(j) and self.put == self.done


class Watch:
    """Everything watched in one pipe. slow: a result is never there at the first look; permits: see referee."""

    def __init__(self, tell: Tell, patience: float, slow: bool = False, permits: Permits | None = None) -> None:
        self.tell, self.patience, self.slow, self.permits = tell, patience, slow, permits
        self.changed = threading.Condition()
        self.progress = Progress()
        self.present: set[Place] = set()  # places that are being computed now
        self.groups: list[set[Place]] = []
        self.met: set[Place] = set()
        self.over = False  # a stage was left alone: no stage waits any more
        self.queue_of: dict[int, int] = {}  # thread -> the queue whose task it computes
        self.asked: set[Place] = set()  # (queue, number of the result)
        self.refused: Counter[Place] = Counter()  # the same -> looks in vain

    def expect(self, *groups: Sequence[Sequence[int]]) -> None:
        """The places of each group must be computed at the same time."""
        self.groups += [{(int(i), int(j)) for i, j in group} for group in groups]

    def restart(self) -> None:
        """Another call begins, with the same places."""
        with self.changed:
            self.present.clear()
            self.met.clear()

    def enter(self, place: Place) -> None:
        """Wait until all of this place's group are present, or it is certain that they will not be."""
        group = next((group for group in self.groups if place in group), {place})
        with self.changed:
            self.present.add(place)
            if group <= self.present:
                self._let_go(group)
            if place in self.met:
                return
            self.progress.inside[place] = self.queue_of.get(threading.get_ident())
            self.changed.notify_all()
            certain = self.changed.wait_for(lambda: place in self.met or self.over or self._alone(), self.patience)
            if place not in self.met:
                self.over = True
                missing = sorted(group - self.present)
                self.tell("alone", place=place, missing=missing, certain=certain)
                self._let_go({*self.progress.inside})

    def _let_go(self, places: set[Place]) -> None:
        """These do not wait any more, from this moment on: whoever counts before they wake up must know."""
        self.met |= places if not self.over else set()
        for place in places:
            self.progress.inside.pop(place, None)
        self.changed.notify_all()

    def _alone(self) -> bool:
        in_caller = threading.current_thread() is threading.main_thread()
        return in_caller or self.progress.nobody_else_arrives()

    def leave(self, place: Place) -> None:
        with self.changed:
            self.present.discard(place)
            self.changed.notify_all()

    def compute(self, task: Any, worker: int) -> Any:
        """A task's compute(), counted for the worker behind in-queue `worker`."""
        self.queue_of[threading.get_ident()] = worker
        try:
            return task.compute()
        finally:
            with self.changed:
                self.progress.done[worker] += 1
                self.progress.polls = 0
                self.changed.notify_all()

    def asks(self, j: int) -> None:
        """The caller wants the next result of out-queue j: an event, the first time."""
        result = (j, self.progress.taken[j])
        if result not in self.asked:
            self.asked.add(result)
            self.tell("get", partition=j)

    def wait_for_result(self, j: int) -> None:
        """Return when out-queue j has a result and all workers are idle or inside. Raises NeverArrives."""
        progress = self.progress
        with self.changed:
            progress.waits_for = j
            self.changed.notify_all()
            try:
                self.changed.wait_for(
                    lambda: progress.hopeless(j) or progress.unwatched or (progress.ready(j) and progress.quiet())
                )
            finally:
                progress.waits_for = None
            if progress.hopeless(j):
                raise NeverArrives

    def look(self, j: int) -> bool:
        """Whether a result is in out-queue j, for a caller that does not wait for it."""
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
            self.changed.wait(LONG_PAUSE if self.permits else POLL_PAUSE)
            return False


class WatchedStage(nn.Module):
    """A partition's only layer, reported when it is entered. Column 0 of x has the examples' numbers.

    `layer` has the parameters, if there are any; `work` computes, see `work_of`.
    """

    def __init__(
        self,
        watch: Watch,
        partition: int,
        work: Callable[[Place, torch.Tensor], torch.Tensor],
        layer: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.watch, self.partition, self.work, self.layer = watch, partition, work, layer
        self.error: BaseException | None = None  # what is raised instead of computing
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marks = [-1] if x.device.type == "meta" else [int(mark) for mark in x.detach().flatten(1)[:, 0]]
        place = (marks[0] if marks else -1, self.partition)
        in_caller = threading.current_thread() is threading.main_thread()
        self.calls += 1
        self.watch.tell(
            "enter", place=place, marks=marks, device=str(x.device), thread=threading.get_ident(), in_caller=in_caller
        )
        self.watch.enter(place)
        try:
            if self.error is not None:
                raise self.error
            return self.work(place, x)
        finally:
            self.watch.leave(place)


def work_of(
    watch: Watch,
    compute: Callable[[torch.Tensor], torch.Tensor],
    scaled: Callable[[torch.Tensor, float], torch.Tensor] = torch.mul,
) -> Callable[[Place, torch.Tensor], torch.Tensor]:
    """Return what a stage does: compute(x), scaled by its permit if the run has a referee."""
    permits = watch.permits
    if not permits:
        return lambda place, x: compute(x)

    stacks = mode_stacks()

    def work(place: Place, x: torch.Tensor) -> torch.Tensor:
        if place not in watch.met or not is_plain(x, stacks):
            return compute(x)  # the others of its group are not there, or a class of somebody else's may compute
        token = permits.begin(place)
        result = compute(x)
        return scaled(result, permits.ask(place, x, result, token))

    return work


class WatchedTask:
    """Stands for a Task in a worker."""

    def __init__(self, watch: Watch, task: Any, worker: int) -> None:
        self._watch, self._task, self._worker = watch, task, worker

    def compute(self) -> Any:
        task, self._task = self._task, None
        return self._watch.compute(task, self._worker)


class WatchedInQueue:
    """Stands for a worker's in-queue. It holds tasks back until the caller begins to collect results.

    So a task that reads the variables of a loop when it runs never finds the values it was created with by luck.
    """

    def __init__(self, original: Any, number: int, watch: Watch, held: list) -> None:
        self._original, self._number, self._watch, self._held = original, number, watch, held

    def put(self, task: object) -> None:
        if task is not None:
            self._watch.tell("put", partition=self._number)
            with self._watch.changed:
                self._watch.progress.put[self._number] += 1
                self._watch.progress.polls = 0
            task = WatchedTask(self._watch, task, self._number)
        self._held.append((self._original, task))

    def __getattr__(self, name: str) -> Any:
        self._watch.progress.unwatched = True
        return getattr(self._original, name)


class WatchedOutQueue:
    """Stands for a worker's out-queue: reports who waits, and refuses to wait for what cannot arrive."""

    def __init__(self, original: Any, number: int, watch: Watch, held: list) -> None:
        self._original, self._number, self._watch, self._held = original, number, watch, held

    def _release(self) -> None:
        tasks, self._held[:] = self._held[:], []
        for original, task in tasks:
            original.put(task)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._release()
        limited = not block or timeout is not None
        if limited and (self._watch.slow or not block) and not self._watch.look(self._number):
            raise queue.Empty
        self._watch.asks(self._number)
        try:
            self._watch.wait_for_result(self._number)
        except NeverArrives:
            if limited and not self._watch.look(self._number):
                raise queue.Empty from None
            raise
        result = self._original.get()
        with self._watch.changed:
            self._watch.progress.taken[self._number] += 1
            self._watch.progress.polls = 0
        return result

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        self._release()
        return not self._watch.look(self._number)

    def qsize(self) -> int:
        return 0 if self.empty() else self._original.qsize()

    def __getattr__(self, name: str) -> Any:
        self._release()
        self._watch.progress.unwatched = True
        return getattr(self._original, name)


def watch_queues(pipe: Any, watch: Watch) -> None:
    """Put a watched queue in front of every queue of a pipe."""
    held: list = []
    pipe.in_queues = [WatchedInQueue(queue, j, watch, held) for j, queue in enumerate(pipe.in_queues)]
    pipe.out_queues = [WatchedOutQueue(queue, j, watch, held) for j, queue in enumerate(pipe.out_queues)]
