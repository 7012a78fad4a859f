"""Explains a pipeline that hangs (--hang_seconds): what the main thread waits for, and what each worker does.

Everything is read from the threads' frames and from their queues when a run has already stopped. A step pays nothing.
"""

import time
from dataclasses import dataclass, replace
from threading import Thread

from common.workers.frames import frame_of, frames_of, name_in_stack, place
from common.workers.rows import RankRow, State
from pipeline.backward import SplitRun
from pipeline.worker import OutQueue, awaited_queue, running_workers, waits_for_task

SETTLE_SECONDS = 0.05  # a worker that takes a task out of its queue is not seen in it yet


@dataclass(frozen=True)
class Doing:
    """What one worker does."""

    name: str  # partition 0 (cpu:0)
    place: str  # folder/file:line; "" while it waits for a task
    for_gradient: bool  # it waits for one, in the backward pass, from the worker of a later partition
    results: int  # in its out-queue: nobody has taken them
    is_awaited: bool  # the main thread waits for its next result

    @property
    def partition(self) -> str:
        return self.name.partition(" (")[0]

    @property
    def is_at_work(self) -> bool:
        return bool(self.place) and not self.for_gradient

    def __str__(self) -> str:
        what = f"is at {self.place}" if self.place else f"{State.WAITS} for a task"
        if self.for_gradient:
            what = f"{State.WAITS} for the gradient of a later partition"
        left = f"; {_count(self.results)} in its out-queue" if self.results else ""
        return f"{self.name}  {what}{left}"


def explain(row: RankRow, main: Thread) -> RankRow:
    """Add to this rank's row what its workers do while `main`, the thread that calls the pipe, does not continue."""
    time.sleep(SETTLE_SECONDS)
    frame = frame_of(main)
    queue = awaited_queue(frame)
    workers = _workers(queue)
    row = replace(row, threads=[str(worker) for worker in workers])
    if queue is None:  # the main thread computes or sleeps elsewhere, and its row says where
        return row
    awaited = next((worker for worker in workers if worker.is_awaited), None)
    waits_for = f"for a result of {awaited.partition}" if awaited else "for a result of a worker that has ended"
    where = place(list(frames_of(frame))[1:])  # [0] is the queue's own
    conclusion = _conclude(workers, f"the main thread waits {waits_for} at {where}")
    return replace(row, state=State.WAITS, call=waits_for, place=where, conclusion=conclusion)


def _workers(queue: OutQueue | None) -> list[Doing]:
    workers = []
    for thread, (_, results) in running_workers().items():
        frame, out_queue = frame_of(thread), results()
        frames = list(frames_of(frame))
        workers.append(
            Doing(
                thread.name,
                "" if waits_for_task(frame) else place(frames) or "an unknown line",
                _waits_for_gradient(frames),
                out_queue.qsize() if out_queue is not None else 0,
                is_awaited=queue is not None and out_queue is queue,
            )
        )
    return workers


def _waits_for_gradient(frames: list[tuple[str, int, str]]) -> bool:
    """Return whether a semaphore of a Cut keeps the worker in Run._backward_of."""
    own = [(file, function) for file, _, function in frames if not file.endswith("threading.py")]
    return len(own) < len(frames) and own[:1] == [name_in_stack(SplitRun._backward_of)]


def _conclude(workers: list[Doing], main: str) -> str:
    """Return what is wrong in one sentence. main: what the main thread waits for."""
    awaited = [worker for worker in workers if worker.is_awaited]
    at_work = [worker for worker in workers if worker.is_at_work]
    if not awaited:
        return main
    if any(worker.is_at_work or worker.for_gradient for worker in awaited):
        busy = [worker for worker in awaited if worker.is_at_work] or at_work
        return f"{main}; " + (", ".join(f"{one.partition} is at {one.place}" for one in busy) or "no worker can")
    others = "every worker waits for a task" if not at_work else f"{awaited[0].partition} waits for a task"
    left = [worker for worker in workers if worker.results]
    if left:
        not_taken = ", ".join(f"{_count(worker.results)} in the out-queue of {worker.partition}" for worker in left)
        return f"{others}, and {main}, but there is {not_taken}: take each result from the out-queue of its partition"
    return f"{others}, and {main}: a result is taken before its task was put, or twice"


def _count(results: int) -> str:
    return "1 result" if results == 1 else f"{results} results"
