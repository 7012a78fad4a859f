"""The collectives of this rank, read from torch's flight recorder, which also records those of DDP.

The recorder keeps the last BUFFER entries, each with operation, sizes, dtypes and Python frames. Gloo and NCCL have one
each. Only NCCL's has sends and receives; they are left out, since they differ between ranks and are counted elsewhere.
The recorder is an internal part of PyTorch. If it is missing, everything here reports no collectives.
"""

import math
import os
import pickle
import threading
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.workers.rows import Calls

BUFFER = 4000
ITERATIONS = 1000  # whose calls are kept
# In these, every rank passes tensors of the same shape; in the others, only some ranks pass tensors.
SAME_SHAPES = ("all_reduce", "all_gather", "broadcast", "reduce", "all_to_all")


def turn_on_recorder() -> None:
    """Turn on the recorder. Call this before the process group is created, when the recorder reads its size."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(BUFFER))


@dataclass(frozen=True)
class Collective:
    """One entry of the recorder."""

    number: int  # among the collectives; in a pipeline on NCCL, only if the recorder still has all entries
    name: str  # all_reduce, gather, ...
    bytes: int  # of this rank's input tensors
    shapes: tuple
    created_ns: int = 0  # when it was called, in the system's time
    is_pending: bool = False  # started and not completed
    group: str = ""  # the process group, and which of its calls this is: the same on all ranks of the group
    sequence: int = 0
    messages_before: int = 0  # entries that are left out
    dtypes: tuple = ()  # of this rank's input tensors, such as Float

    @property
    def entry(self) -> int:
        """Its number among all entries of the recorder."""
        return self.number + self.messages_before

    @property
    def tensors(self) -> str:
        """Their shapes in words, such as (16x4)."""
        return "(" + ", ".join("x".join(map(str, shape)) or "a number" for shape in self.shapes) + ")"

    @property
    def signature(self) -> str:
        """What must agree between ranks: the collective and, where all pass the same shapes, these."""
        return f"{self.name} {self.tensors}" if self.name in SAME_SHAPES else self.name

    def __str__(self) -> str:
        return f"{self.name} #{self.number + 1} {self.tensors}"


def recorded() -> list[Collective]:
    """Return the entries of the recorder, oldest first; an empty list if there is no recorder.

    The source lines are left out: looking them up takes seconds the first time.
    """
    try:
        entries = pickle.loads(_dump())["entries"]  # made by torch in this process
    except (ImportError, RuntimeError, KeyError, TypeError):
        return []
    collectives: list[Collective] = []
    for i, entry in enumerate(entries):
        if not (entry.get("is_p2p") or "coalesced" in entry["profiling_name"]):
            collectives.append(_collective(entry, messages_before=i - len(collectives)))
    return collectives


def uses_nccl() -> bool:
    """Return whether this rank is in a process group of NCCL."""
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _dump() -> bytes:
    """Return the recorder of the backend in use."""
    if uses_nccl():
        from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

        return _dump_nccl_trace(includeStackTraces=False)
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    return _dump_fr_trace(includeStackTraces=False)


class CollectiveLog:
    """Counts the collectives of a run by name and by iteration, without a limit."""

    def __init__(self) -> None:
        self.begun: list[int] = []  # when each iteration began, in the system's time
        self.total: Counter[str] = Counter()  # since the process group was created, whatever was forgotten
        self._of_iteration: dict[int, list[str]] = {}  # iteration, from 1 -> its calls; 0: before the first
        self._first = 0  # the first iteration whose calls are all known
        self._lock = threading.Lock()  # the watchdog reads while the main thread waits
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._last = -1
        self._iterations_until_full = 0
        self._iterations = 0

    def begin_iteration(self) -> None:
        """Begin the next iteration, to which all later calls belong: the recorder knows the time of every call."""
        self.begun.append(time.time_ns())

    def iteration_at(self, nanoseconds: int) -> int:
        """Return the iteration at this time, from 1; 0 before the first."""
        return bisect_right(self.begun, nanoseconds)

    def drain(self, entries: list[Collective] | None = None) -> int:
        """Add the entries since the last call; return their number, with those that are left out."""
        with self._lock:
            before = self._last
            entries = recorded() if entries is None else entries
            fresh = [entry for entry in entries if entry.entry > before]
            if fresh and fresh[0].number > 0 and len(fresh) == len(entries):  # the recorder has overwritten some
                self._first = self.iteration_at(fresh[0].created_ns) + 1
            for entry in fresh:
                self._count[entry.name] += 1
                self._bytes[entry.name] += entry.bytes
                self.total[entry.name] += 1
                self._of_iteration.setdefault(self.iteration_at(entry.created_ns), []).append(entry.signature)
                self._last = entry.entry
            self._first = max(self._first, len(self.begun) + 1 - ITERATIONS)
            for old in [iteration for iteration in self._of_iteration if iteration < self._first]:
                del self._of_iteration[old]
            return self._last - before

    def calls(self) -> Calls:
        """Return what other ranks need to compare their calls with those of this one."""
        with self._lock:
            changes: dict[int, list[str]] = {}
            before: list[str] | None = None
            for iteration in range(self._first, len(self.begun) + 1):
                made = self._of_iteration.get(iteration, [])
                if made != before:
                    changes[iteration] = before = made
            return Calls(dict(self.total), self._first, len(self.begun), changes)

    def forget(self) -> None:
        """Forget earlier entries and start to count."""
        self._count, self._bytes = Counter(), Counter()

    def drain_before_it_overflows(self) -> None:
        """Call this after every iteration. It reads the recorder only before its buffer overflows: that is slow."""
        self._iterations += 1
        if self._iterations < self._iterations_until_full:
            return
        per_iteration = max(1, self.drain() // max(1, self._iterations))
        self._iterations_until_full = max(1, BUFFER // (2 * per_iteration))
        self._iterations = 0

    def summary(self) -> list[dict]:
        """Return [{"name", "count", "bytes"}]: calls, and the bytes of the tensors that this rank passed in."""
        return [{"name": n, "count": self._count[n], "bytes": self._bytes[n]} for n in sorted(self._count)]


_CHARACTERS = {"byte": "uint8", "unsigned char": "uint8", "char": "int8", "signed char": "int8"}


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a dtype in C++'s words, such as BFloat16 or long int; 0 if it is none."""
    name = dtype.removeprefix("c10::").removesuffix(" int").lower()
    known = getattr(torch, _CHARACTERS.get(name, name), None)
    return known.itemsize if isinstance(known, torch.dtype) else 0


def _collective(entry: dict, messages_before: int = 0) -> Collective:
    name = entry["profiling_name"].split(":")[-1].split(" ")[0]
    name = {"allreduce": "all_reduce", "allgather": "all_gather", "all_reduce_barrier": "barrier"}.get(name, name)
    shapes = tuple(tuple(shape) for shape in entry.get("input_sizes", ()))
    dtypes = tuple(dtype.removeprefix("torch.") for dtype in entry.get("input_dtypes", ()))
    sizes = [math.prod(shape) * element_bytes(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    # Gloo marks an entry as retired when it is complete. NCCL only does so later, in a thread of its own.
    on_nccl = entry["profiling_name"].startswith("nccl:")
    pending = entry["state"] != "completed" if on_nccl else not entry.get("retired", True)
    created, number = entry.get("time_created_ns") or 0, entry["record_id"] - messages_before
    group, sequence = str(entry.get("process_group", [""])[0]), entry.get("collective_seq_id") or 0
    return Collective(number, name, sum(sizes), shapes, created, pending, group, sequence, messages_before, dtypes)
