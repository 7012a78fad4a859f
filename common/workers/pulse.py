"""What this worker's main thread does: its iteration and phase, and the calls of torch.distributed that it makes.

A call is noted in a file before it is made. The file survives the process: if two ranks call collectives of different
sizes, gloo aborts one of them on the spot, and only what it has called last says why.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from common.workers.frames import frames_of, place
from common.workers.rows import NotedCall

RECENT = 64  # calls in the file; more are never on their way at the same time
BYTES = 256  # of a call in the file
MESSAGES = ("send", "recv")
# The methods behind the functions of torch.distributed: the function, and which argument holds the tensors whose shapes
# must agree between ranks. DDP's C++ code does not call them.
METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0), "broadcast": ("broadcast", 0), "reduce": ("reduce", 0), "gather": ("gather", 1),
    "scatter": ("scatter", 0), "allgather": ("all_gather", 1), "reduce_scatter": ("reduce_scatter", 0),
    "all_gather_single": ("all_gather", 1), "reduce_scatter_single": ("reduce_scatter", 0),
    "alltoall": ("all_to_all", None), "all_to_all_single": ("all_to_all", None), "barrier": ("barrier", None),
    "send": ("send", None), "recv": ("recv", None), "recv_anysource": ("recv", None),
}  # fmt: skip


class Pulse:
    """The progress of the main thread; a step pays a few assignments for it."""

    def __init__(self) -> None:
        self.beats = 0  # batches, of training or evaluation
        self.rests = True  # no batch is due: before training, between epochs, and after the last one
        self.iteration = 0  # of training, from 1
        self.phase = ""  # forward, backward, ...: the block of Record.phase in which the worker is
        self.calls = 0
        self.collectives: Counter[str] = Counter()  # by name
        # How many collectives of all ranks an iteration made, where it is another number than in the one before.
        self.per_iteration: list[tuple[int, int]] = []
        # Of a worker that computes in several threads: adds to its row what they do.
        self.explain: Callable | None = None
        self._in_iteration = 0

    def beat(self) -> None:
        self.beats += 1
        self.rests = False

    def begin_iteration(self) -> None:
        """Begin the next iteration, to which all later calls belong."""
        if not self.per_iteration or self.per_iteration[-1][1] != self._in_iteration:
            self.per_iteration.append((self.iteration, self._in_iteration))
        self._in_iteration = 0
        self.iteration += 1

    def count(self, name: str, is_of_all_ranks: bool) -> None:
        self.calls += 1
        if name not in MESSAGES:
            self.collectives[name] += 1
            self._in_iteration += is_of_all_ranks


@contextlib.contextmanager
def noted_calls(pulse: Pulse, file: int) -> Iterator[None]:
    """Note all calls in the block, each before it is made, in the file with this descriptor."""
    numbers: Counter[str] = Counter()  # group -> its collectives so far

    def noted(method: Callable, name: str, argument: int | None) -> Callable:
        def call(group: dist.ProcessGroup, *arguments: object, **keywords: object) -> object:
            number = 0
            if name not in MESSAGES:
                number = numbers[group.group_name] = numbers[group.group_name] + 1
            tensors = "" if argument is None else shapes(arguments[argument])
            where = place(frames_of(sys._getframe(1)))
            line = NotedCall(pulse.calls, group.group_name, number, name, tensors, where, pulse.iteration)
            os.pwrite(file, json.dumps(line).encode().ljust(BYTES), BYTES * (pulse.calls % RECENT))
            pulse.count(name, group.size() == dist.get_world_size())
            return method(group, *arguments, **keywords)

        return call

    # From the class's own dictionary: what getattr returns of a C++ method would not bind to an object again.
    methods = {method: vars(dist.ProcessGroup)[method] for method in METHODS if method in vars(dist.ProcessGroup)}
    for method in methods:
        setattr(dist.ProcessGroup, method, noted(getattr(dist.ProcessGroup, method), *METHODS[method]))
    try:
        yield
    finally:
        for method, original in methods.items():
            setattr(dist.ProcessGroup, method, original)


def read_calls(file: int) -> list[NotedCall]:
    """Return the last calls of a rank, oldest first."""
    calls, content = [], b""
    with contextlib.suppress(OSError):  # the run ends, and has closed the file
        content = os.pread(file, BYTES * RECENT, 0)
    for start in range(0, len(content), BYTES):
        with contextlib.suppress(ValueError, TypeError):  # it is being written at this moment
            calls.append(NotedCall(*json.loads(content[start : start + BYTES])))
    return sorted(calls, key=lambda call: call.nth)


def shapes(tensors: Any) -> str:
    """Return the shapes of one or several tensors, such as (16x4) or (3, 5)."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    words = ["x".join(map(str, tensor.shape)) or "a number" for tensor in tensors if isinstance(tensor, torch.Tensor)]
    more = ["..."] if len(words) > 4 else []
    return f"({', '.join([*words[:4], *more])})" if words else ""
