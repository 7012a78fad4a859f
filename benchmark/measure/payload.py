"""Bytes that a worker sends, by the algorithms of gloo and NCCL, from what torch's flight recorder saw.

S: bytes of the tensor that a worker hands in, N: workers. The mean over the workers, in bytes sent:

    all_reduce      2 (N-1)/N S    a ring: reduce_scatter, then all_gather (Patarasuk and Yuan 2009)
    reduce_scatter  2 (N-1)/N S    gloo does a whole all_reduce; a ring (NCCL) needs half of it
    all_gather        (N-1)   S    S is the worker's own part
    all_to_all, broadcast, reduce, gather, scatter   about (N-1)/N S

What is sent from rank to rank is not among the recorded collectives: an engine says how much that is.
"""

from typing import TYPE_CHECKING

from benchmark.settings import Settings
from common.workers.collectives import Collective, recorded

if TYPE_CHECKING:
    from benchmark.engines.engine import Engine

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


def sends_nothing(strategy: str, workers: int, sent_bytes: float | None) -> str:
    """Say that a strategy with several workers has sent nothing; empty if it has, or if it is not known."""
    if workers == 1 or sent_bytes != 0:
        return ""
    return f"{strategy}: a step sends nothing to the other workers, so nothing is synchronised; see benchmark.prove"


class Payload:
    """The collectives of one step, which begins with this object; the recorder is slow to read."""

    def __init__(self) -> None:
        self._last = max((one.entry for one in recorded()), default=-1)

    def collectives(self) -> list[Collective] | None:
        """Return those of the step; None where torch has no recorder, or has forgotten some."""
        found = recorded()
        if not found or found[0].entry > self._last + 1:
            return None
        return [one for one in found if one.entry > self._last]

    def of_engine(self, engine: "Engine", settings: Settings) -> Sent:
        """Return bytes and calls of an engine's step; None where they are not known."""
        calls = self.collectives()
        if calls is None:
            return (0.0, 0) if settings.world_size == 1 else (None, None)
        sizes = engine.group_sizes()  # where it is not all workers
        of_calls = (
            sent(one.name, one.bytes, sizes.get(one.group, settings.world_size), settings.backend) for one in calls
        )
        return sum(of_calls) + engine.unrecorded_bytes(), len(calls)
