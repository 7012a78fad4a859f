"""Bytes that a worker sends, by the algorithms of gloo and NCCL, from what torch's flight recorder saw.

S: bytes of the tensor that a worker hands in, N: workers. The mean over the workers, in bytes sent:

    all_reduce      2 (N-1)/N S    a ring: reduce_scatter, then all_gather (Patarasuk and Yuan 2009)
    reduce_scatter  2 (N-1)/N S    gloo does a whole all_reduce; a ring (NCCL) needs half of it
    all_gather        (N-1)   S    S is the worker's own part
    all_to_all, broadcast, reduce, gather, scatter   about (N-1)/N S

What is sent from rank to rank is not among the recorded collectives: an engine says how much that is.
"""

from typing import Any

from benchmark.settings import Settings
from common.workers.collectives import recorded

Sent = tuple[float | None, int | None]  # bytes, calls


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
    """The collectives of one step, which begins with this object; the recorder is slow to read."""

    def __init__(self) -> None:
        self._last = max((entry.number for entry in recorded()), default=-1)

    def of_engine(self, engine: Any, settings: Settings) -> Sent:
        """Bytes and calls of an engine's step; None where the recorder does not know, or has overflowed."""
        entries, workers = recorded(), settings.world_size
        fresh = [entry for entry in entries if entry.number > self._last]
        if (not entries and workers > 1) or (fresh and fresh[0].number > self._last + 1):
            return None, None
        sizes = engine.group_sizes()  # where it is not all workers
        sent_bytes = (sent(one.name, one.bytes, sizes.get(one.group, workers), settings.backend) for one in fresh)
        return sum(sent_bytes) + engine.unrecorded_bytes(), len(fresh)
