"""Bytes that a worker sends, by the algorithms of gloo and NCCL, from what torch's flight recorder saw.

S: bytes of the tensor that a worker hands in, N: workers. The mean over the workers, in bytes sent:

    all_reduce      2 (N-1)/N S    a ring: reduce_scatter, then all_gather (Patarasuk and Yuan 2009)
    reduce_scatter  2 (N-1)/N S    gloo does a whole all_reduce; a ring (NCCL) needs half of it
    all_gather        (N-1)   S    S is the worker's own part
    all_to_all, broadcast, reduce, gather, scatter   about (N-1)/N S

What is sent from rank to rank is not among the recorded collectives: an engine says how much that is.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmark.settings import Settings
from common.workers.collectives import recorded


def passes(name: str, backend: str) -> int:
    """How often the pieces go round the ring."""
    return 1 if "reduce_scatter" in name and backend != "gloo" else 2


def sent(name: str, size: int, workers: int, backend: str = "gloo") -> float:
    """Bytes out of one worker for one collective, as a mean over the workers."""
    share = size - size / workers  # all but the part that stays
    if name.startswith("all_reduce") or "reduce_scatter" in name:
        return passes(name, backend) * share
    if "all_gather" in name or "allgather" in name:
        return (workers - 1) * size
    return 0 if name == "barrier" else share


class Payload:
    """Collectives between two moments of a run; read rarely, the recorder is slow to read."""

    def __init__(self) -> None:
        self._last = _newest()
        self._ignored: list[range] = []

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """What stands inside does not count."""
        before = _newest()
        yield
        self._ignored.append(range(before + 1, _newest() + 1))

    def of_engine(self, engine: Any, settings: Settings, steps: int) -> dict[str, float | None]:
        """{"bytes", "calls"} per step of an engine; None where the recorder does not know, or has overflowed."""
        entries, workers = recorded(), settings.world_size
        fresh = [entry for entry in entries if entry.number > self._last]
        if (not entries and workers > 1) or (fresh and fresh[0].number > self._last + 1):
            return {"bytes": None, "calls": None}
        fresh = [entry for entry in fresh if not any(entry.number in span for span in self._ignored)]
        sizes = engine.group_sizes()  # where it is not all workers
        sent_bytes = (sent(one.name, one.bytes, sizes.get(one.group, workers), settings.backend) for one in fresh)
        return {"bytes": sum(sent_bytes) / steps + engine.unrecorded_bytes(), "calls": len(fresh) / steps}


def _newest() -> int:
    return max((entry.number for entry in recorded()), default=-1)
