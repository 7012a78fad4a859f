"""One worker thread per partition: it gets a Task from one queue and puts the result into another.

             in_queues[j]                                   out_queues[j]
    caller  ── Task ──────>  worker of partition j  ──────>  (True, (task, batch)) or (False, exc_info)  ──>  caller

A worker takes its tasks in order and never uses another worker's queues. While it computes, torch releases Python's
global interpreter lock, so workers really run at the same time.
"""

import atexit
import contextlib
import contextvars
import sys
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple

import torch

from common.workers.frames import runs, self_in


class Task:
    """A piece of work for a worker: a function without arguments that returns a tensor.

    Each thread has its own grad mode and autocast. A task uses those of the thread that created it. Otherwise the
    workers would build graphs even under torch.no_grad().
    """

    def __init__(self, compute: Callable[[], object]) -> None:
        self._compute: Callable[[], object] | None = compute
        self._context = contextvars.copy_context()
        self._grad_enabled = torch.is_grad_enabled()
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds}

    def compute(self) -> object:
        """Call the function, once, and release it: a result that is never collected keeps its task alive."""
        compute, self._compute = self._compute, None
        context, self._context = self._context, contextvars.Context()
        assert compute is not None, "a task is computed once"
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self._grad_enabled))
            for kind, dtype in self._autocast.items():
                modes.enter_context(torch.autocast(kind, dtype=dtype))
            return context.run(compute)


class InQueue:
    """The queue of tasks for one worker. When no object refers to the queue any more, its worker ends."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        weakref.finalize(self, self.tasks.put, None).atexit = False

    def put(self, task: Task | None) -> None:
        """Put a task into the queue; None ends the worker."""
        self.tasks.put(task)


class OutQueue(SimpleQueue):
    """The queue of results of one worker."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As in SimpleQueue. This frame of Python shows who_waits.py for which queue a thread waits."""
        return super().get(block, timeout)


class Queues(NamedTuple):
    """The two queues of a running worker."""

    tasks: SimpleQueue
    results: weakref.ref[OutQueue]


def create_workers(devices: Sequence[torch.device]) -> tuple[list[InQueue], list[OutQueue]]:
    """Start one worker thread per device of the list and return their (in_queues, out_queues).

    An out-queue returns results in the order of the tasks: (True, (task, batch)), or (False, exc_info) if the task
    raised. exc_info is as in sys.exc_info(): `raise exc_info[1]` raises the same exception, with its traceback.
    """
    in_queues: list[InQueue] = []
    out_queues: list[OutQueue] = []
    # The workers on CPUs share the cores: otherwise each would start as many threads as there are cores.
    on_cpu = max(1, sum(device.type == "cpu" for device in devices))
    num_threads = max(1, torch.get_num_threads() // on_cpu)
    for partition, device in enumerate(devices):
        in_queue = InQueue()
        results = OutQueue()
        arguments = (device, num_threads, in_queue.tasks, weakref.ref(results))
        thread = Thread(target=_work, args=arguments, name=f"partition {partition} ({device})", daemon=True)
        thread.start()
        _running[thread] = Queues(in_queue.tasks, weakref.ref(results))
        in_queues.append(in_queue)
        out_queues.append(results)
    return in_queues, out_queues


def _work(device: torch.device, num_threads: int, tasks: SimpleQueue, out_queue: weakref.ref[OutQueue]) -> None:
    """Take a task, compute it, put its result into the out-queue, and repeat until None arrives.

    The out-queue belongs to the pipe. If the worker held a reference to it, an exception left in the queue would keep
    the pipe alive through its traceback, and the worker would never end.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (task := tasks.get()) is not None:
        try:
            result: tuple[bool, object] = (True, (task, task.compute()))
        except BaseException:  # any exception: the caller waits for a result
            result = (False, sys.exc_info())
        if (results := out_queue()) is not None:
            results.put(result)
        del task, result, results  # an idle worker must not keep a micro-batch alive


_running: weakref.WeakKeyDictionary[Thread, Queues] = weakref.WeakKeyDictionary()


def running_workers() -> dict[Thread, Queues]:
    """Return the workers that have not ended, of all pipes, in the order in which they were started."""
    return {thread: queues for thread, queues in list(_running.items()) if thread.is_alive()}


def waits_for_task(frame: FrameType | None) -> bool:
    """Return whether a worker waits for its next task; `frame` is its innermost one."""
    return runs(frame, _work)


def awaited_queue(frame: FrameType | None) -> OutQueue | None:
    """Return the out-queue for whose next result a thread waits; `frame` is its innermost one."""
    queue = self_in(frame, OutQueue.get)
    return queue if isinstance(queue, OutQueue) else None


@atexit.register
def _end_all_workers() -> None:
    """Wait for each worker: a thread that still computes while the interpreter shuts down would crash it."""
    workers = list(_running.items())
    for _, queues in workers:
        queues.tasks.put(None)
    for thread, _ in workers:
        thread.join()
