"""ZeRO-1 and ZeRO-2, b.6: shards of the parameters and of the mean gradient, and the messages that bring them."""

from __future__ import annotations

from functools import partial
from itertools import groupby, pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from grader.arithmetic import EXACT
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank
from grader.wire.values import Fields
from tests.beyond import sharded_optimizer_memory as memory
from tests.beyond import sharded_optimizer_shared as shared
from tests.beyond import toy_shared
from tests.beyond.sharded_optimizer_shared import SHARDED, TOY, OptimizerRun, bucket_of, check_means, check_none_left
from tests.beyond.toy_shared import BYTES, MicroBatch, Send, check_in_transit, check_order, check_times

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context
    from tests.beyond.sharded_optimizer_in_rank import ShardedToy, described

graded = pytest.mark.graded
CRASHES = toy_shared.CRASHES


# --- what a rank does ---


@in_rank(uses=[TOY, SHARDED], preload=("steps",))
def run_backwards(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return the shards, whether each is a view of flat.values, and the gradients after every finish()."""
    sharded = ShardedToy(context, lesson, inputs)
    shards = described("shard", [shard.values for shard in sharded.shards()])
    for i, bucket in enumerate(sharded.optimizer.buckets):
        whole, own = bucket.flat.values.untyped_storage(), bucket.shard.values.untyped_storage()
        shards[f"is {i} a view"] = whole.data_ptr() == own.data_ptr()
    finishes = []
    for step in range(len(inputs["uses"])):
        for number in sharded.run_step(step):
            left = [k for k, parameter in enumerate(sharded.toy.numbered) if parameter.grad is not None]
            means = described("mean", [shard.gradient for shard in sharded.shards()])
            finishes.append({"step": step, "number": number, "left": left} | means)
        sharded.optimizer.zero_grad()
    return {"shards": shards, "finishes": finishes}


# --- shards ---


def check_shards(run: OptimizerRun) -> None:
    """Check that each rank holds its part of the values in float32, for float32 parameters as a view."""
    for rank, value in enumerate(run.result.values):
        for i, bucket in enumerate(run.buckets):
            right = run.setting.flat(bucket, run.initial, run.ranks)
            belongs = "the values are those of rank {r}'s shard: rank r owns the elements r L to (r+1) L"
            others = {belongs.replace("{r}", str(r)): right[r] for r in range(run.ranks)}
            dtype = "the values of the shard are in {got}, expected float32, also for bfloat16 parameters"
            wrong = "the values are not this rank's part of flat.values"
            copied = (
                "a change of the shard does not reach the parameters: the shard of float32 parameters must be a view "
            )
            copied += "of flat.values, not a copy"
            expected = {
                f"shard {i}'s dtype": Expected("float32", dtype),
                f"shard {i}": Expected(right[rank], wrong, mistakes=others, tolerance=EXACT),
            }
            if not run.is_half(i):
                expected[f"is {i} a view"] = Expected(True, copied)
            check(run.grade, f"{run.ranks} ranks, bucket {i}, rank {rank}: ", value["shards"], expected)


# --- messages ---


def buckets_of(run: OptimizerRun, rank: int, micro: MicroBatch, where: str) -> list[tuple[int, Send]]:
    """Return the messages that hold numbers, with the bucket of each."""
    sends, current = list[tuple[int, Send]](), 0
    rows = [run.rows(rank, micro.step, micro.number, i) for i in range(len(run.buckets))]
    what = "its own gradients of one bucket, as take_gradients returns them"
    for send in (send for send in micro.sends if send.call.payload):
        current = bucket_of(run, where, send.call, rows, what, current)
        sends.append((current, send))
    return sends


def check_sent(run: OptimizerRun) -> None:
    """Check that each rank sends its gradients, buckets in order; stage 1 in finish(), stage 2 during backward."""
    sizes = [sum(run.initial[k].size for k in bucket) for bucket in run.buckets]
    for rank in range(run.ranks):
        for micro in run.micros(rank):
            if run.setting.stage == 1 and micro.number < len(run.setting.uses[micro.step]) - 1:
                continue
            where = f"step {micro.step}, micro-batch {micro.number}: rank {rank}"
            sends = buckets_of(run, rank, micro, where)
            order = [bucket for bucket, _ in groupby(bucket for bucket, _ in sends)]
            check_order(run.grade, where, order, len(run.buckets), sends[0][1].call.where if sends else "")
            if run.setting.stage == 2:
                advice = "The hook must send every complete bucket, in a loop"
                check_times(run.grade, where, micro, run.buckets, sends, advice)
            check_in_transit(run.grade, where, [(i, send.call) for i, send in sends], sizes, run.name)
            for (before, earlier), (bucket, later) in pairwise(sends):
                if before != bucket and not earlier.call.in_transit(later.call):
                    run.grade.fail(
                        f"{where} receives bucket {before}, the newest, before it sends bucket {bucket} "
                        f"({later.call.where}): receive only the older one of two, which had time to travel"
                    )


def check_costs(run: OptimizerRun) -> None:
    """Check that an exchange of gradients sends (N-1)/N of their bytes a rank, and no parameter keeps a gradient.

    bfloat16 may be sent as float32.
    """
    size = sum(run.bytes_of(i) * 4 // BYTES[run.setting.dtype(bucket[0])] for i, bucket in enumerate(run.buckets))
    advice = "a rank needs only its shard of the sum: reduce_scatter or all_to_all"
    for micros in zip(*map(run.micros, range(run.ranks)), strict=True):
        where = f"step {micros[0].step}, micro-batch {micros[0].number}: for the gradients"
        run.check_price([send.call for micro in micros for send in micro.sends], size, where, advice)
    check_none_left(run)


# --- the graded tests ---


@graded("b.6")
def test_each_rank_owns_its_shard_and_gets_the_mean_of_its_gradients(grade: Grade) -> None:
    for ranks, setting in shared.FOR_MEANS:
        run = OptimizerRun(grade, ranks, setting, run_backwards)
        check_shards(run)
        check_means(run, partial(check_sent, run))


@graded("b.6")
def test_micro_batches_add_up_in_float32_and_every_step_starts_afresh(grade: Grade) -> None:
    for ranks, setting in ((3, shared.ACCUMULATED), (2, shared.ACCUMULATED_1), (3, shared.HALF)):
        run = OptimizerRun(grade, ranks, setting, run_backwards)
        check_shards(run)
        check_means(run, partial(check_sent, run))


@graded("b.6")
def test_gradients_cost_no_more_than_a_reduce_scatter_and_leave_no_memory_behind(grade: Grade) -> None:
    for ranks, setting in shared.FOR_COSTS:
        check_costs(OptimizerRun(grade, ranks, setting, run_backwards))
    memory.check_messages(grade)


@graded("b.6")
def test_zero_2_sends_a_bucket_as_soon_as_it_is_complete_and_zero_1_in_finish(grade: Grade) -> None:
    runs = [OptimizerRun(grade, ranks, setting, run_backwards) for ranks, setting in shared.FOR_TIMES]
    for run in runs:  # a hook that waits ends one of them, before anybody looks at the order of messages
        check_sent(run)
