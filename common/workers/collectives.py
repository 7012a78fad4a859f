"""The collectives of this rank, read from torch's flight recorder, which also records those of DDP.

The recorder keeps the last BUFFER entries, each with operation, sizes, dtypes and Python frames. It is an internal
part of PyTorch. If it is missing, everything here reports no collectives.
"""

import math
import os
import pickle
from dataclasses import dataclass

BUFFER = 4000


def turn_on_recorder() -> None:
    """Turn on the recorder. Call this before the process group is created, when the recorder reads its size."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(BUFFER))


@dataclass(frozen=True)
class Collective:
    """One entry of the recorder."""

    number: int
    name: str  # all_reduce, gather, ...
    bytes: int  # of this rank's input tensors
    place: str  # file:line of the call, outside torch
    shapes: tuple

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "a number" for shape in self.shapes)
        return f"{self.name} #{self.number + 1} ({shapes}) at {self.place}"


def recorded(with_places: bool = False) -> list[Collective]:
    """Return the entries of the recorder, oldest first; an empty list if there is no recorder.

    Looking up the source lines takes seconds the first time, so they are left out by default.
    """
    try:
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

        dump = _dump_fr_trace(includeStackTraces=with_places)
        entries = pickle.loads(dump)["entries"]  # made by torch in this process
    except (ImportError, RuntimeError, KeyError, TypeError):
        return []
    return [_collective(entry) for entry in entries]


class CollectiveLog:
    """Counts the collectives of a run by name, without a limit."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._last = -1
        self._iterations_until_full = 0
        self._iterations = 0

    def drain(self) -> int:
        """Add the entries since the last call; return their number."""
        fresh = [entry for entry in recorded() if entry.number > self._last]
        for entry in fresh:
            self._count[entry.name] = self._count.get(entry.name, 0) + 1
            self._bytes[entry.name] = self._bytes.get(entry.name, 0) + entry.bytes
            self._last = entry.number
        return len(fresh)

    def forget(self) -> None:
        """Forget earlier entries and start to count."""
        self._count, self._bytes = {}, {}

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


_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}  # others: 1


def _collective(entry: dict) -> Collective:
    name = entry["profiling_name"].split(":")[-1].split(" ")[0]
    name = {"allreduce": "all_reduce", "allgather": "all_gather"}.get(name, name)
    shapes = tuple(tuple(shape) for shape in entry.get("input_sizes", ()))
    dtypes = [dtype.removeprefix("torch.") for dtype in entry.get("input_dtypes", ())]
    sizes = [math.prod(shape) * _BYTES.get(dtype, 1) for shape, dtype in zip(shapes, dtypes, strict=False)]
    return Collective(entry["record_id"], name, sum(sizes), _place(entry), shapes)


def _place(entry: dict) -> str:
    """Return the innermost frame that is not part of torch."""
    for frame in entry.get("frames", ()):
        file = frame.get("filename", "")
        if file.endswith(".py") and "/torch/" not in file and "contextlib" not in file:
            return f"{'/'.join(file.split('/')[-2:])}:{frame['line']}"
    return "an unknown line"
