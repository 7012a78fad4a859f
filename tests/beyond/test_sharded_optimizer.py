"""ZeRO-1 and ZeRO-2, b.6: shards of the parameters and of the mean gradient, and the messages that bring them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import EXACT, Tolerance, norm
from grader.checks.beyond import in_transit
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank
from tests.beyond import sharded_optimizer_memory as memory
from tests.beyond import sharded_optimizer_shared as shared
from tests.beyond import toy_shared
from tests.beyond.sharded_optimizer_shared import SHARDED, TOY, OptimizerRun
from tests.beyond.toy_shared import BYTES, ROUNDING, MicroBatch, Send, check_order, check_times, rounded

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context
    from tests.beyond.sharded_optimizer_in_rank import Sharded, described

graded = pytest.mark.graded
CRASHES = toy_shared.CRASHES


# --- what a rank does ---


@in_rank(uses=[TOY, SHARDED], preload=("steps",))
def run_backwards(context: Context, lesson: Any, inputs: Any) -> Any:
    """Return the shards, whether each is a view of flat.values, and the gradients after every finish()."""
    sharded = Sharded(context, lesson, inputs)
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
    """Each rank holds its part of the values in float32; of float32 parameters it is a view."""
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


# --- the mean gradient ---


def check_means(run: OptimizerRun) -> None:
    """After each finish() every shard has the mean of what all ranks have computed in this step so far."""
    for rank, value in enumerate(run.result.values):
        for finish in value["finishes"]:
            step, number = finish["step"], finish["number"]
            where = f"step {step}, micro-batch {number}, rank {rank} of {run.ranks}, shard.gradient of "
            for i in range(len(run.buckets)):
                right = run.mean(step, number, i)
                mean = Expected(right[rank], name=f"bucket {i}", tolerance=Tolerance(norm([right])))
                if not mean.is_right(finish[f"mean {i}"]):
                    mean = replace(mean, mistakes=mistakes_in_mean(run, rank, (step, number), i))
                check(run.grade, where, finish, {f"mean {i}": mean}, run.result)


def mistakes_in_mean(run: OptimizerRun, rank: int, place: tuple[int, int], i: int) -> dict[str, Any]:
    """Return sentence -> what a known mistake leaves in the gradient of a shard."""
    (step, number), ranks = place, range(run.ranks)
    n, right = run.ranks, run.mean(step, number, i)
    sent = np.asarray([run.rows(r, step, number, i) for r in ranks])  # (ranks, shards, L)
    own, what = sent[rank, rank], "shard.gradient is"
    table: dict[str, Any] = {"expected a tensor in shard.gradient after receive(), got None": None}
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
    return table


# --- messages ---


def buckets_of(run: OptimizerRun, rank: int, micro: MicroBatch, where: str) -> list[tuple[int, Send]]:
    """Return the messages that hold numbers, with the bucket of each. Fail for numbers that are no bucket's."""
    found, current = list[tuple[int, Send]](), 0
    rows = [run.rows(rank, micro.step, micro.number, i) for i in range(len(run.buckets))]
    for send in (send for send in micro.sends if send.call.payload):
        numbers = send.call.sent_arrays()
        roundings = [ROUNDING[run.setting.dtype(bucket[0])] for bucket in run.buckets]
        fits = [i for i, shards in enumerate(rows) if holds(numbers, shards, roundings[i])]
        if not fits:
            what, advice = ("other values", "") if np.any(numbers) else ("zeros", "; send each bucket once")
            run.grade.fail(
                f"{where} sends {what} ({send.call.name}, {send.call.where}), expected its own gradients of one "
                f"bucket, as take_gradients returns them{advice}"
            )
        current = next((i for i in fits if i >= current), fits[0])  # zeros fit several
        found.append((current, send))
    return found


def holds(numbers: np.ndarray, shards: np.ndarray, rounding: float) -> bool:
    """Return whether a message is made of these shards, divided by the number of ranks or not."""
    ranks, length = shards.shape
    if numbers.size % length or (numbers.size not in (length, shards.size) and not np.any(numbers)):
        return False
    parts, factors = numbers.reshape(-1, length).astype(np.float64), (1, ranks)
    return all(
        any(np.allclose(part * factor, shard, rounding, 1e-5) for shard in shards for factor in factors)
        for part in parts
    )


def check_sent(run: OptimizerRun) -> None:
    """Each rank sends its own gradients, all buckets in their order; stage 1 in finish(), stage 2 during backward."""
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
            in_transit.check(run.grade, where, [(i, send.call) for i, send in sends], sizes, "bucket {}".format)


def check_costs(run: OptimizerRun) -> None:
    """Each exchange of gradients costs (N-1)/N of their bytes for a rank, and no parameter keeps a gradient.

    bfloat16 may travel as float32.
    """
    size = sum(run.bytes_of(i) * 4 // BYTES[run.setting.dtype(bucket[0])] for i, bucket in enumerate(run.buckets))
    advice = "a rank needs only its shard of the sum: reduce_scatter or all_to_all"
    for micros in zip(*map(run.micros, range(run.ranks)), strict=True):
        where = f"step {micros[0].step}, micro-batch {micros[0].number}: for the gradients"
        run.check_price([send.call for micro in micros for send in micro.sends], size, where, advice)
    left = {"left": Expected([], "parameter {got} still has a gradient after finish()")}
    for rank, value in enumerate(run.result.values):
        for finish in value["finishes"]:
            check(run.grade, f"step {finish['step']}, rank {rank}: ", finish, left)


# --- the graded tests ---


@graded("b.6")
def test_each_rank_owns_its_shard_and_gets_the_mean_of_its_gradients(grade: Grade) -> None:
    for ranks, setting in shared.FOR_MEANS:
        run = OptimizerRun(grade, ranks, setting, run_backwards)
        check_shards(run)
        check_means(run)


@graded("b.6")
def test_micro_batches_add_up_in_float32_and_every_step_starts_afresh(grade: Grade) -> None:
    for ranks, setting in ((3, shared.ACCUMULATED), (2, shared.ACCUMULATED_1), (3, shared.HALF)):
        run = OptimizerRun(grade, ranks, setting, run_backwards)
        check_shards(run)
        check_means(run)


@graded("b.6")
def test_gradients_cost_no_more_than_a_reduce_scatter_and_leave_no_memory_behind(grade: Grade) -> None:
    for ranks, setting in shared.FOR_COSTS:
        check_costs(OptimizerRun(grade, ranks, setting, run_backwards))
    memory.check_messages(grade)


@graded("b.6")
def test_zero_2_sends_a_bucket_as_soon_as_it_is_complete_and_zero_1_in_finish(grade: Grade) -> None:
    for ranks, setting in shared.FOR_TIMES:
        check_sent(OptimizerRun(grade, ranks, setting, run_backwards))
