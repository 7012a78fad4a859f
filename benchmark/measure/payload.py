"""Bytes that a worker sends, by the algorithms of gloo and NCCL, from what torch's flight recorder saw.

S: bytes of the tensor that a worker hands in, N: workers. The mean over the workers, in bytes sent:

    all_reduce      2 (N-1)/N S    a ring: reduce_scatter, then all_gather (Patarasuk and Yuan 2009)
    reduce_scatter  2 (N-1)/N S    gloo does a whole all_reduce; a ring (NCCL) needs half of it
    all_gather        (N-1)   S    S is the worker's own part
    all_to_all, broadcast, reduce, gather, scatter   about (N-1)/N S, point to point   S
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
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
    if name in ("send", "isend"):
        return size
    if name in ("recv", "irecv", "barrier") or name.startswith(("recv", "coalesced")):
        return 0
    return share


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

    def since(self, workers: int, backend: str, steps: int, group_sizes: Mapping[str, int] = {}) -> dict | None:
        """{"bytes", "calls", "by_name"} per step; None where the recorder does not know (or has overflowed).

        group_sizes: by the name of the process group, where it is not all workers.
        """
        entries = recorded()
        fresh = [entry for entry in entries if entry.number > self._last]
        if (not entries and workers > 1) or (fresh and fresh[0].number > self._last + 1):
            return None
        fresh = [entry for entry in fresh if not any(entry.number in span for span in self._ignored)]
        by_name: dict[str, float] = defaultdict(float)
        for entry in fresh:
            size = group_sizes.get(entry.group, workers)
            by_name[entry.name] += sent(entry.name, entry.bytes, size, backend) / steps
        return {"bytes": sum(by_name.values()), "calls": len(fresh) / steps, "by_name": dict(by_name)}

    def of_engine(self, engine: Any, settings: Settings, steps: int) -> dict[str, float | None]:
        """{"bytes", "calls"} per step of an engine, with the messages that gloo sends unrecorded; None: not known."""
        found = self.since(settings.world_size, settings.backend, steps, engine.group_sizes())
        if found is None:
            return {"bytes": None, "calls": None}
        # The recorder has NCCL's messages from rank to rank, not gloo's.
        more = engine.unrecorded_bytes() if settings.backend == "gloo" else 0.0
        return {"bytes": found["bytes"] + more, "calls": found["calls"]}


def _newest() -> int:
    return max((entry.number for entry in recorded()), default=-1)
