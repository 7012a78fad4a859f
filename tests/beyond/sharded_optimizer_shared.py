"""What b.6 and b.7 share: toys whose parameters are cut into shards, and what every rank's shards must hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grader.grading import Grade
from grader.in_rank import InRank, run
from grader.ranks.calls import Call
from grader.wire import drawn
from tests.beyond.toy_shared import BYTES, Arrays, MicroBatch, ToySetting, draw, micro_batches, rounded, why_stuck

TOY, SHARDED = "tests/beyond/toy_in_rank.py", "tests/beyond/sharded_optimizer_in_rank.py"
SMALL = 200  # bytes of a step that may travel beside the shards: a barrier, a number
HINTS = {  # torch's words -> what they mean here
    "split_with_sizes expects": "a shard is only this rank's part: its values and its gradient have flat.shard_length "
    "elements",
    "attempting to assign a gradient with dtype": "the values of a shard and its gradient are in float32, also for "
    "bfloat16 parameters",
    "assigned grad has data of": "the values of a shard and its gradient are in float32, also for bfloat16 parameters",
    "'NoneType' object has no attribute 'wait'": "receive() finds no handle: send() must store the handle in "
    "self.work, for a bucket without gradients, too; receive a bucket once, after it was sent, in the order of "
    "self.buckets",
    "torch.bfloat16": "a message can have only one dtype: send this rank's shard in the dtype of flat.values",
}


@dataclass(frozen=True, kw_only=True)
class Setting(ToySetting):
    """A toy and its blocks. A parameter in several blocks, or in none, belongs to the root.

    late: the rank that is one gradient behind; limits: of clipping, for each step (empty: no clipping).
    """

    blocks: list[list[int]]
    stage: int = 2
    late: int | None = None
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    weight_decay: float = 0.0
    limits: list[float | None] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("blocks", "stage", "late", "optimizer", "options", "weight_decay")
        limits = self.limits or [None] * len(self.uses)
        return super().arguments | {name: getattr(self, name) for name in names} | {"limits": limits}

    def buckets(self) -> list[list[int]]:
        """Return the parameters of each bucket: the last block first, the root last; in each, matrices first."""
        found: list[list[int]] = [[] for _ in range(len(self.blocks) + 1)]
        for k in range(len(self.shapes)):
            homes = [i for i, block in enumerate(self.blocks) if k in block]
            if k not in self.frozen:
                found[homes[0] if len(homes) == 1 else -1].append(k)
        ordered = [*found[-2::-1], found[-1]]
        return [sorted(bucket, key=lambda k: len(self.shapes[k]) < 2) for bucket in ordered if bucket]

    def flat(self, bucket: list[int], arrays: Arrays | dict[int, np.ndarray], ranks: int) -> np.ndarray:
        """Return the values of a bucket, a row for each rank's shard; zeros at the end."""
        values = np.concatenate([np.ravel(arrays[k]).astype(np.float64) for k in bucket])
        return np.append(values, np.zeros(-values.size % ranks)).reshape(ranks, -1)

    def initial(self, seed: int) -> Arrays:
        """Return the parameters' values at the start, the same on every rank."""
        generator = drawn.generator(seed, 16)
        values = [generator.normal(size=shape) for shape in self.shapes]
        return [rounded(value, self.dtype(k)).astype(np.float32) for k, value in enumerate(values)]


# The root (5, 6) is used first and last. Buckets: 4 3 | 0 2 1 | 6 5; 17, 28 and 17 elements, so some shards are padded.
PLAIN = Setting(
    shapes=[[3, 4], [4], [2, 3, 2], [5], [4, 3], [7], [2, 5]],
    blocks=[[0, 1, 2], [3, 4]],
    uses=[[[[5, 0, 1, 2, 3, 4, 6]]]],
)
LATE = replace(PLAIN, late=2)
# On ranks above 0 the second bucket is complete first, and must wait for the first. All have one size.
CROSSED = replace(
    PLAIN,
    shapes=[[4]] * 6,
    blocks=[[0, 1], [2, 3], [4, 5]],
    uses=[[[[0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]]]],
)
# 0 is tied, in no block, used first and last; 6 is in two blocks; 3 and 9 are frozen; 5 is never used, block 3 in some
# steps, and 4 by some ranks. Block 4 has nothing to train.
ODD = Setting(
    shapes=[[4, 3], [4], [2, 2], [5], [3, 5], [6], [7], [3, 3], [2, 2], [3]],
    blocks=[[1, 2], [3, 4, 5, 6], [6, 7], [8], [9]],
    uses=[
        [[[0, 1, 2, 3, 4, 6, 7, 8, 0], [0, 1, 2, 6, 7, 8, 0]]],
        [[[0, 2, 1, 6, 9, 7, 6, 0], [0, 1, 4, 6, 7, 2, 0]]],
        [[[6, 1, 0], [2, 4, 8, 1, 0]]],
    ],
    frozen=[3, 9],
    tied=0,
)
# A bucket of 2.6 MB, in which a shard begins and ends inside a matrix, beside some bytes.
LARGE = Setting(shapes=[[3], [640, 1024], [5]], blocks=[[0, 1]], uses=[[[[2, 0, 1]]]])
# One block in bfloat16: its sum over the ranks, and over two micro-batches, needs float32.
HALF = Setting(
    shapes=[[60, 40], [9], [5], [3, 4]],
    blocks=[[0, 1], [2, 3]],
    uses=[[[[0, 1, 2, 3]], [[0, 1, 3, 2]]], [[[0, 1, 2, 3]]]],
    dtypes=["bfloat16", "bfloat16", "float32", "float32"],
)
# Three micro-batches, then two: in the second step nothing of the first may be left.
ACCUMULATED = replace(
    PLAIN,
    uses=[
        [[[5, 0, 1, 2, 3, 4, 6]], [[5, 0, 1, 2, 3, 4, 6]], [[5, 3, 4, 2, 1, 0, 6]]],
        [[[5, 0, 1, 2, 3, 4, 6]], [[5, 0, 1, 3, 4, 6], [5, 2, 1, 3, 4, 6]]],
    ],
)
ACCUMULATED_1 = replace(ACCUMULATED, stage=1)
FOR_MEANS = ((3, PLAIN), (2, LARGE), (4, ODD), (1, PLAIN), (2, ODD), (3, replace(ODD, stage=1)))
FOR_COSTS = ((3, PLAIN), (2, LARGE), (4, ODD), (2, ACCUMULATED_1), (3, HALF))
FOR_TIMES = ((3, PLAIN), (3, LATE), (3, CROSSED), (3, ACCUMULATED), (2, ACCUMULATED_1), (4, ODD))


class OptimizerRun:
    """One run of a setting: what is right for each rank, and what the ranks did."""

    def __init__(self, grade: Grade, ranks: int, setting: Setting, function: InRank) -> None:
        self.grade, self.ranks, self.setting, self.buckets = grade, ranks, setting, setting.buckets()
        self.initial = setting.initial(grade.seed)
        given = draw(grade.seed, ranks, setting)
        self.computed = given.computed
        inputs = [one | {"values": self.initial} for one in given.inputs]
        self.result = run(grade, function, inputs, HINTS, why_stuck, later=given.permits, **setting.arguments)

    def rows(self, rank: int, step: int, number: int, bucket: int) -> np.ndarray:
        """Return what a rank has to send of a bucket, a row for each shard. Stage 1 adds up micro-batches before."""
        micros = (
            self.computed[rank][step][: number + 1] if self.setting.stage == 1 else [self.computed[rank][step][number]]
        )
        return self.setting.flat(self.buckets[bucket], [sum(one) for one in zip(*micros, strict=True)], self.ranks)

    def sums(self, step: int, number: int, bucket: int) -> list[np.ndarray]:
        """Return the sums over all ranks that a step has received after this micro-batch, a row for each shard."""
        numbers = range(number + 1) if self.setting.stage == 2 else [number]
        return [np.sum([self.rows(r, step, one, bucket) for r in range(self.ranks)], axis=0) for one in numbers]

    def mean(self, step: int, number: int, bucket: int) -> np.ndarray:
        return np.asarray(np.sum(self.sums(step, number, bucket), axis=0) / self.ranks)

    def is_half(self, bucket: int) -> bool:
        return self.setting.dtype(self.buckets[bucket][0]) == "bfloat16"

    def bytes_of(self, bucket: int) -> int:
        """Return the bytes of all ranks' shards together, in the parameters' dtype."""
        values = self.setting.flat(self.buckets[bucket], self.initial, self.ranks)
        return values.size * BYTES[self.setting.dtype(self.buckets[bucket][0])]

    def micros(self, rank: int) -> list[MicroBatch]:
        return micro_batches(self.grade, self.result, self.setting, rank)

    def check_price(self, calls: Iterable[Call], size: int, where: str, advice: str) -> None:
        """Calls of all ranks together cost at most (N-1)/N of `size` bytes for a rank, and a few bytes more."""
        calls = list(calls)
        mean, right = sum(call.price for call in calls) / self.ranks, size - size / self.ranks
        if mean > right + SMALL:
            largest = max(calls, key=lambda call: call.price)
            self.grade.fail(
                f"{where}, each of {self.ranks} ranks sends {int(mean)} bytes, expected {int(right)}, (N-1)/N of "
                f"{size} bytes; the largest message is {largest.name} of {largest.dtype} ({largest.where}): {advice}"
            )
