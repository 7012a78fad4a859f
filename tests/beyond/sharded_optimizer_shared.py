"""Shared by b.6 to b.10: toys whose parameters are cut into shards, and what every rank's shards must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from grader.arithmetic import Tolerance, close, norm
from grader.compare import Expected, check, forgotten_waits
from grader.grading import Grade
from grader.in_rank import run
from grader.ranks.calls import Call
from grader.wire import drawn
from grader.wire.request import RankFunction
from grader.wire.values import Fields
from tests.beyond.toy_shared import (
    BYTES,
    ROUNDING,
    Arrays,
    MicroBatch,
    ToySetting,
    draw,
    micro_batches,
    rounded,
    why_backward_is_stuck,
)  # fmt: skip

TOY, SHARDED = "tests/beyond/toy_in_rank.py", "tests/beyond/sharded_optimizer_in_rank.py"
NEVER_RECEIVED = "its message was sent and never received: put what is sent where finish() finds it"
SMALL = 200  # bytes that a step may send beside the shards: a barrier, a number
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
class ShardSetting(ToySetting):
    """A toy and its blocks. A parameter in several blocks, or in none, belongs to the root.

    late: the rank that is one gradient behind; limits: the clipping limit of each step (empty: no clipping).
    """

    blocks: list[list[int]]
    stage: int = 2
    late: int | None = None
    optimizer: str = "SGD"
    options: Fields = field(default_factory=lambda: {"lr": 0.1})
    weight_decay: float = 0.0
    limits: list[float | None] = field(default_factory=list)

    @property
    def arguments(self) -> Fields:
        names = ("blocks", "stage", "late", "optimizer", "options", "weight_decay")
        limits = self.limits or [None] * len(self.uses)
        return super().arguments | {name: getattr(self, name) for name in names} | {"limits": limits}

    def buckets(self) -> list[list[int]]:
        """Return the trainable parameters of each bucket: the last block first, the root last; in each, matrices first.

        A parameter in no block, or in several, belongs to the root.
        """
        members: list[list[int]] = [[] for _ in self.blocks]
        root: list[int] = []
        for k in range(len(self.shapes)):
            homes = [i for i, block in enumerate(self.blocks) if k in block]
            if k not in self.frozen:
                (members[homes[0]] if len(homes) == 1 else root).append(k)
        ordered = [*members[::-1], root]
        return [sorted(bucket, key=lambda k: len(self.shapes[k]) < 2) for bucket in ordered if bucket]

    def flat(self, bucket: list[int], arrays: Arrays | dict[int, np.ndarray], ranks: int) -> np.ndarray:
        """Return the values of a bucket, a row for each rank's shard, padded with zeros."""
        values = np.concatenate([np.ravel(arrays[k]).astype(np.float64) for k in bucket])
        return np.append(values, np.zeros(-values.size % ranks)).reshape(ranks, -1)

    def parameters_of(self, bucket: list[int], shards: np.ndarray) -> dict[int, np.ndarray]:
        """Return the parameters that the shards of a bucket hold, in their dtype."""
        parts = np.split(np.ravel(shards), np.cumsum([int(np.prod(self.shapes[k])) for k in bucket]))
        return {k: rounded(part, self.dtype(k)).reshape(self.shapes[k]) for k, part in zip(bucket, parts, strict=False)}

    def initial(self, seed: int) -> Arrays:
        """Return the parameters' values at the start, the same on every rank."""
        generator = drawn.generator(seed, 16)
        values = [generator.normal(size=shape) for shape in self.shapes]
        return [rounded(value, self.dtype(k)).astype(np.float32) for k, value in enumerate(values)]


# The root (5, 6) is used first and last. Buckets: 4 3 | 0 2 1 | 6 5; 17, 28 and 17 elements, so some shards are padded.
PLAIN = ShardSetting(
    shapes=[[3, 4], [4], [2, 3, 2], [5], [4, 3], [7], [2, 5]],
    blocks=[[0, 1, 2], [3, 4]],
    uses=[[[[5, 0, 1, 2, 3, 4, 6]]]],
)
LATE = replace(PLAIN, late=2)
SPECIAL = replace(PLAIN, zero=[3, 4], infinite=[0])  # on the last rank, all of a bucket is zero
# On ranks above 0 the second bucket is complete first, and must wait for the first. All buckets have the same size.
CROSSED = replace(
    PLAIN,
    shapes=[[4]] * 6,
    blocks=[[0, 1], [2, 3], [4, 5]],
    uses=[[[[0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]]]],
)
# 0 is tied, in no block, used first and last; 6 is in two blocks; 3 and 9 are frozen; 5 is never used, block 3 in some
# steps, and 4 by some ranks. Block 4 has nothing to train.
ODD = ShardSetting(
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
LARGE = ShardSetting(shapes=[[3], [640, 1024], [5]], blocks=[[0, 1]], uses=[[[[2, 0, 1]]]])
# One block in bfloat16: its sum over the ranks, and over two micro-batches, needs float32.
HALF = ShardSetting(
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
FOR_MEANS = ((3, PLAIN), (2, LARGE), (4, ODD), (1, PLAIN), (2, ODD), (3, replace(ODD, stage=1)), (3, SPECIAL))
FOR_COSTS = ((3, PLAIN), (2, LARGE), (4, ODD), (2, ACCUMULATED_1), (3, HALF))
FOR_TIMES = ((3, PLAIN), (3, LATE), (3, CROSSED), (3, ACCUMULATED), (2, ACCUMULATED_1), (4, ODD))


class OptimizerRun:
    """One run of a setting: what is right for each rank, and what the ranks did."""

    hints, part = HINTS, "bucket"  # part: what messages call a bucket
    why_stuck = staticmethod(why_backward_is_stuck)

    def __init__(self, grade: Grade, ranks: int, setting: ShardSetting, function: RankFunction) -> None:
        self.grade, self.ranks, self.setting, self.buckets = grade, ranks, setting, setting.buckets()
        self.initial = setting.initial(grade.seed)
        given = draw(grade.seed, ranks, setting)
        self.computed = given.computed
        inputs = [one | {"values": self.initial} | self.more_inputs(rank) for rank, one in enumerate(given.inputs)]
        self.result = run(grade, function, inputs, self.hints, self.why_stuck, **setting.arguments)

    def more_inputs(self, rank: int) -> Fields:
        """Return what a rank gets beside the toy's gradients and values."""
        return {}

    def name(self, i: int) -> str:
        """Return what messages call a bucket."""
        return f"bucket {i}"

    def rows(self, rank: int, step: int, number: int, bucket: int) -> np.ndarray:
        """Return the gradients of a bucket that a rank sends, a row for each shard. Stage 1 adds up micro-batches."""
        first = 0 if self.setting.stage == 1 else number
        micros = self.computed[rank][step][first : number + 1]
        return self.setting.flat(self.buckets[bucket], [sum(one) for one in zip(*micros, strict=True)], self.ranks)

    def sums(self, step: int, number: int, bucket: int) -> list[np.ndarray]:
        """Return the sums over ranks that a step has received so far, each with a row for each shard."""
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
        """Check that the calls of all ranks send at most (N-1)/N of `size` bytes a rank, and SMALL bytes more."""
        calls = list(calls)
        mean, right = sum(call.price for call in calls) / self.ranks, size - size / self.ranks
        if mean > right + SMALL:
            largest = max(calls, key=lambda call: call.price)
            self.grade.fail(
                f"{where}, each of {self.ranks} ranks sends {int(mean)} bytes, expected {int(right)}, (N-1)/N of "
                f"{size} bytes; the largest message is {largest.name} of {largest.dtype} ({largest.where}): {advice}"
            )


# --- the mean gradient ---


def check_means(run: OptimizerRun, check_sent: Callable[[], None]) -> None:
    """Check that after each finish() every shard has the mean of the gradients of this step so far.

    Of a value that no known mistake leaves, `check_sent` may say the reason: a wrong message.
    """
    for rank, value in enumerate(run.result.values):
        for finish in value["finishes"]:
            step, number = finish["step"], finish["number"]
            where = f"step {step}, micro-batch {number}, rank {rank} of {run.ranks}, shard.gradient of "
            for i in range(len(run.buckets)):
                right = run.mean(step, number, i)
                mean = Expected(right[rank], name=run.name(i), tolerance=Tolerance(norm([right])))
                if not mean.is_right(finish[f"mean {i}"]):
                    mean = replace(mean, mistakes=mistakes_in_mean(run, rank, (step, number), i))
                    if finish[f"mean {i}"] is None and forgotten_waits(run.result):
                        run.grade.fail(f"{where}{run.name(i)} is None: {NEVER_RECEIVED}")
                    known = any(mean.explained_by(mistake, finish[f"mean {i}"]) for mistake in mean.mistakes)
                    if not known and not forgotten_waits(run.result):
                        check_sent()
                check(run.grade, where, finish, {f"mean {i}": mean}, run.result)


def mistakes_in_mean(run: OptimizerRun, rank: int, place: tuple[int, int], i: int) -> Fields:
    """Return mistake -> what it leaves in the gradient of a shard."""
    (step, number), ranks = place, range(run.ranks)
    n, right = run.ranks, run.mean(step, number, i)
    sent = np.asarray([run.rows(r, step, number, i) for r in ranks])  # (ranks, shards, L)
    own, what = sent[rank, rank], "shard.gradient is"
    table: Fields = {"expected a tensor in shard.gradient after receive(), got None": None}
    if n > 1:
        table |= {
            f"{what} {n} times the mean: divide the sum by the number of ranks": right[rank] * n,
            "the sum was divided by the number of ranks twice": right[rank] / n,
            **{f"{what} the gradient of rank {r}'s shard": right[r] for r in ranks},
            f"{what} this rank's own gradient: nothing of the other ranks is in it": own,
            f"{what} this rank's own gradient, divided: nothing of the other ranks is in it": own / n,
            **{f"{what} only rank {r}'s gradient: add the rows of all ranks": sent[r, rank] for r in ranks},
            "elements of different ranks are mixed: the received tensor is N rows of L, one per rank":
                sent[:, rank].reshape(-1, n).mean(axis=1),
            "gradients of different shards are added up: all ranks send the shards in the same order":
                np.mean([sent[r, (rank - r) % n] for r in ranks], axis=0),
            f"{what} zero: send each bucket once, when its gradients are ready": np.zeros(own.shape),
        }  # fmt: skip
    if number and run.setting.stage == 2:
        late, first = sent.mean(axis=0)[rank], run.mean(step, 0, i)[rank]
        table[f"{what} only the gradient of the last micro-batch: add it to that of the earlier ones"] = late
        table[f"{what} only the gradient of the first micro-batch: add the later ones"] = first
    for earlier in range(step):
        before = run.mean(earlier, len(run.setting.uses[earlier]) - 1, i)[rank]
        table[f"{what} still the gradient of step {earlier}"] = before
        table[f"the gradient of step {earlier} is added to shard.gradient"] = right[rank] + before
    if run.is_half(i):
        sums = [rounded(one[rank], "bfloat16") for one in run.sums(step, number, i)]
        words = f"{what} rounded to bfloat16: add up in float32. A reduce_scatter adds in the dtype of its tensors"
        table[words] = np.sum(sums, axis=0) / n
        rounded_means = [rounded(one[rank] / n, "bfloat16") for one in run.sums(step, number, i)]
        table[f"{what} a mean in bfloat16: convert the rows to float32 before you add them"] = np.sum(
            rounded_means, axis=0
        )
    return table


def check_none_left(run: OptimizerRun) -> None:
    """Check that no parameter keeps a gradient after finish()."""
    left = {
        "left": Expected(
            [],
            f"parameter {{got}} still has a gradient after finish(): send and receive every {run.part}",
        )
    }
    for rank, value in enumerate(run.result.values):
        for finish in value["finishes"]:
            check(run.grade, f"step {finish['step']}, rank {rank}: ", finish, left)


# --- what a message holds ---


def bucket_of(run: OptimizerRun, where: str, call: Call, rows: Sequence[np.ndarray], what: str, first: int = 0) -> int:
    """Return the bucket whose shards a message holds. Zeros may fit several: the first from number `first` on, else
    the first of all.

    rows: for each bucket, a row for each shard that the message may hold: all shards where gradients are sent, only
    this rank's own in a gather. Fail for numbers that are in none of them; `what` names what they should be.
    """
    numbers = call.sent_arrays()
    roundings = [ROUNDING[run.setting.dtype(bucket[0])] for bucket in run.buckets]
    fits = [
        i for i, (shards, rounding) in enumerate(zip(rows, roundings, strict=True)) if holds(numbers, shards, rounding)
    ]
    if not fits:
        got, advice = (
            ("other values", "")
            if np.any(numbers)
            else ("zeros", f"; send each {run.part} once, when its own gradients are complete")
        )
        run.grade.fail(observed=f"{where} sends {got} ({call.name}, {call.where}), expected {what}{advice}")
    return next((i for i in fits if i >= first), fits[0])


def holds(numbers: np.ndarray, shards: np.ndarray, rounding: float) -> bool:
    """Return whether a message consists of these shards, as they are or divided by the number of ranks."""
    ranks, length = shards.shape
    if numbers.size % length:
        return False
    if not np.any(numbers) and numbers.size not in (length, shards.size):
        return False
    parts, factors = numbers.reshape(-1, length).astype(np.float64), (1, ranks)
    limits = [Tolerance(limit=rounding * np.abs(shard) + 1e-5) for shard in shards]
    return all(
        any(close(part * n, *row) for n in factors for row in zip(shards, limits, strict=True)) for part in parts
    )
