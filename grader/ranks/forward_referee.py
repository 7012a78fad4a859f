"""Stands for Pipe.compute where Pipe.forward is looked at alone: in the grader's process, where no student's code runs.

    rank, stand-in for _clock_cycles    ── micro-batches, partitions ──────>    referee: notes them
    rank, stand-in for compute          ── pairs, micro-batches ───────────>    referee: notes them
                                        <── what the partitions made of them ──

What partitions make of their inputs is known here alone, so the values of the output show what compute was called with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grader.ranks.referee import Answers
from grader.wire.values import Fields

MAX_CALLS = 200  # calls of compute, and of _clock_cycles, that are kept


@dataclass
class Seen:
    """One call of forward: the (micro-batches, partitions) that a schedule was asked for, and the calls of compute."""

    asked: list[list[int]] = field(default_factory=list)
    calls: list[Fields] = field(default_factory=list)  # sizes, pairs, nested, given


@dataclass
class ForwardReferee:
    """Partition j makes factors[i, j] x + shifts[i, j] of micro-batch i, and the last one changes its shape as well."""

    factors: np.ndarray
    shifts: np.ndarray
    stages: int
    shape: str
    seen: list[Seen] = field(default_factory=list)  # of each call of forward

    def started(self, pids: Sequence[int]) -> None:
        """Nothing here depends on the ranks' processes."""

    def ask(self, message: dict) -> Answers:
        """What the stand-ins of probes.pipeline.forward send."""
        number, answer = int(message["id"]), None
        if message["what"] == "begin":
            self.seen.append(Seen())
        elif message["what"] == "schedule":
            self.seen[-1].asked = [*self.seen[-1].asked, [int(count) for count in message["sizes"]]][:MAX_CALLS]
        else:
            answer = self._compute(message, self.seen[-1].calls)
        return [(number, answer)]

    def _compute(self, message: dict, calls: list[Fields]) -> list[np.ndarray | None]:
        """A result for each pair, None where there is no such micro-batch or partition."""
        if len(calls) < MAX_CALLS:
            given = [] if calls else [None if x is None else np.asarray(x) for x in message["given"]]
            call = {"sizes": list(message["sizes"]), "pairs": message["pairs"], "nested": bool(message["nested"])}
            calls.append(call | {"given": given})
        return [self._result(pair, x) for pair, x in zip(message["pairs"], message["inputs"], strict=True)]

    def _result(self, pair: Sequence[int], x: object) -> np.ndarray | None:
        i, j = pair
        if x is None or not (0 <= i < len(self.factors) and 0 <= j < self.stages):
            return None
        result = self.factors[i, j] * x + self.shifts[i, j]
        return change_shape(result, self.shape) if j == self.stages - 1 else result


def change_shape(x: np.ndarray, shape: str) -> np.ndarray:
    """What the last partition makes of its result: another shape, and for "flat" and "deep" another type."""
    if shape == "flat":  # (B, ...) -> (B,)
        return x.astype(np.float64).reshape(len(x), -1).sum(axis=1) / 2
    if shape == "deep":  # (B, ...) -> (B, ..., 2)
        return np.stack([x.astype(np.float64), -x.astype(np.float64)], axis=-1)
    return x
