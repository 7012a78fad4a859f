"""Partitions that tell who enters and leaves them, and that can wait inside for each other. Used in ranks only.

A Station is a layer of the grader's. It opens its door for a micro-batch, which is known by the number in its first
place. A Hall knows who is inside, which tasks were handed out, and whether the caller waits for a result: so it can
say that two partitions never meet without waiting for any time to pass.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from grader.probes import Context

Place = tuple[int, int]  # (micro-batch, partition)
SHORT = 2.0  # seconds


class Hall:
    """All stations of one pipe."""

    def __init__(self, context: Context, patience: float) -> None:
        self.context, self.patience = context, patience
        self.changed = threading.Condition()
        self.inside: set[Place] = set()
        self.groups: list[set[Place]] = []
        self.met: set[Place] = set()
        self.handed: dict[int, int] = {}  # partition -> tasks in its queue or in work
        self.entered = 0
        self.awaited = False  # the caller waits for a result
        self.over = False  # somebody was left alone: nobody waits any more

    def expect(self, *groups: Sequence[Sequence[int]]) -> None:
        """The places of each group are to be inside at the same time."""
        self.groups += [{(int(i), int(j)) for i, j in group} for group in groups]

    def handed_out(self, partition: int) -> None:
        self.context.event("put", partition=partition)
        with self.changed:
            self.handed[partition] = self.handed.get(partition, 0) + 1

    def waits(self, partition: int) -> None:
        self.context.event("get", partition=partition)
        with self.changed:
            self.awaited = True
            self.changed.notify_all()

    def all_have_begun(self, tasks: int) -> None:
        """Wait until so many tasks have looked up what they need. For a moment only: a wrong task may never begin."""
        with self.changed:
            self.changed.wait_for(lambda: self.entered >= tasks, SHORT)

    def waited(self) -> None:
        with self.changed:
            self.awaited = False

    def enter(self, place: Place) -> None:
        """Wait inside until all of this place's group are inside too, or it is clear that they will not come."""
        group = next((group for group in self.groups if place in group), {place})
        with self.changed:
            self.entered += 1
            self.inside.add(place)
            if group <= self.inside:
                self.met |= group
            self.changed.notify_all()
            came = self.changed.wait_for(lambda: place in self.met or self.over or self._stuck(), self.patience)
            if place not in self.met:
                self.over = True
                inside, missing = sorted(self.inside), sorted(group - self.inside)
                self.context.event("alone", place=place, inside=inside, missing=missing, certain=came)

    def _stuck(self) -> bool:
        """Nobody else can come: every partition with a task is inside already, and the caller waits for one of them."""
        if threading.current_thread() is threading.main_thread():
            return True
        return self.awaited and sum(tasks > 0 for tasks in self.handed.values()) <= len(self.inside)

    def leave(self, place: Place) -> None:
        with self.changed:
            self.inside.discard(place)
            partition = place[1]
            self.handed[partition] = self.handed.get(partition, 1) - 1
            self.changed.notify_all()


class Station(nn.Module):
    """A partition's only layer: `compute`, with a door."""

    def __init__(self, hall: Hall, partition: int, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hall, self.partition, self.compute = hall, partition, compute
        self.error: BaseException | None = None  # what is raised instead of computing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marks = [-1] if x.device.type == "meta" else [int(mark) for mark in x.detach().flatten(1)[:, 0]]
        place = (marks[0], self.partition)
        thread = threading.current_thread()
        self.hall.context.event(
            "enter", place=place, marks=marks, device=str(x.device), thread=thread.ident or 0,
            in_caller=thread is threading.main_thread(),
        )  # fmt: skip
        self.hall.enter(place)
        try:
            if self.error is not None:
                raise self.error
            return self.compute(x)
        finally:
            self.hall.leave(place)
            self.hall.context.event("leave", place=place)


class InQueue:
    """In front of a worker's in-queue: tasks wait here until the caller begins to collect.

    So a task that looks up the variables of a loop when it runs never finds those it was made with, not even by luck.
    """

    def __init__(self, queue: Any, partition: int, hall: Hall, held: list) -> None:
        self._queue, self._partition, self._hall, self._held = queue, partition, hall, held

    def put(self, task: Any, *arguments: Any, **keywords: Any) -> None:
        if task is not None:
            self._hall.handed_out(self._partition)
        self._held.append((self._queue, task))

    put_nowait = put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class OutQueue:
    """In front of a worker's out-queue: lets all held tasks go, and notes that the caller waits."""

    def __init__(self, queue: Any, partition: int, hall: Hall, held: list, at_once: bool) -> None:
        self._queue, self._partition, self._hall, self._held = queue, partition, hall, held
        self._at_once = at_once

    def release(self) -> int:
        """Returns how many tasks that were."""
        tasks, self._held[:] = self._held[:], []
        for queue, task in tasks:
            queue.put(task)
        return len(tasks)

    def get(self, *arguments: Any, **keywords: Any) -> Any:
        tasks = self._hall.entered + self.release()
        self._hall.waits(self._partition)
        if self._at_once:
            self._hall.all_have_begun(tasks)
        try:
            return self._queue.get(*arguments, **keywords)
        finally:
            self._hall.waited()

    def __getattr__(self, name: str) -> Any:
        self.release()
        return getattr(self._queue, name)


def watch_queues(pipe: Any, hall: Hall, at_once: bool = False) -> None:
    """Put a door in front of every queue of a pipe. at_once: nothing is collected before all tasks have begun."""
    held: list = []
    pipe.in_queues = [InQueue(queue, j, hall, held) for j, queue in enumerate(pipe.in_queues)]
    pipe.out_queues = [OutQueue(queue, j, hall, held, at_once) for j, queue in enumerate(pipe.out_queues)]
