"""The collectives of this rank, read from torch's flight recorder, which also records those of DDP.

The recorder keeps the last BUFFER entries, each with operation, sizes, dtypes and Python frames. Gloo and NCCL have one
each. Only NCCL's has sends and receives; they are left out, since they differ between ranks and are counted elsewhere.
The recorder is an internal part of PyTorch. If it is missing, everything here reports no collectives.
"""

import math
import os
import pickle
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

BUFFER = 4000


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
    is_pending: bool = False  # started and not completed
    group: str = ""  # the process group
    sequence: int = 0  # which call of the group this is: the same on all its ranks
    messages_before: int = 0  # sends, receives and the like that the recorder had before it, which are left out
    dtypes: tuple = ()  # of this rank's input tensors, such as Float

    @property
    def entry(self) -> int:
        """Its number among all entries of the recorder."""
        return self.number + self.messages_before

    @property
    def tensors(self) -> str:
        """Their shapes in words, such as (16x4)."""
        return "(" + ", ".join("x".join(map(str, shape)) or "a number" for shape in self.shapes) + ")"

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


def pending() -> Collective | None:
    """Return the first collective that this rank has called and that is not complete."""
    return next((entry for entry in recorded() if entry.is_pending), None)


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
    """Counts the collectives of a run by name, however many there are."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._last = -1
        self._iterations_until_full = 0
        self._iterations = 0

    def drain(self) -> int:
        """Count the entries since the last call; return how many the recorder has had, those left out included."""
        before = self._last
        for entry in recorded():
            if entry.entry > before:
                self._count[entry.name] += 1
                self._bytes[entry.name] += entry.bytes
                self._last = entry.entry
        return self._last - before

    def forget(self) -> None:
        """Start again from zero: what was drained so far no longer counts."""
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


# C++'s names of types of one byte -> torch's
_BYTE_TYPES = {"byte": "uint8", "unsigned char": "uint8", "char": "int8", "signed char": "int8"}


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a dtype in C++'s words, such as BFloat16 or long int; 0 if it is none."""
    name = dtype.removeprefix("c10::").removesuffix(" int").lower()
    known = getattr(torch, _BYTE_TYPES.get(name, name), None)
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
    number = entry["record_id"] - messages_before
    group, sequence = str(entry.get("process_group", [""])[0]), entry.get("collective_seq_id") or 0
    return Collective(number, name, sum(sizes), shapes, pending, group, sequence, messages_before, dtypes)
