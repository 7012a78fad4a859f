"""ZeRO-1 and ZeRO-2, b.7: clipping by the norm of all shards, and steps that leave all ranks with equal parameters."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from grader.arithmetic import EXACT, Tolerance, norm
from grader.call_checks import phases
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run, run_alone
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond import sharded_optimizer_memory as memory
from tests.beyond import sharded_optimizer_shared as shared
from tests.beyond import toy_shared
from tests.beyond.sharded_optimizer_shared import SHARDED, TOY, OptimizerRun, ShardSetting
from tests.beyond.toy_shared import check_together, is_message, once_in_bfloat16

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, Tensor, copy_of, nn, torch
    from tests.beyond.sharded_optimizer_in_rank import ShardedToy, described

graded = pytest.mark.graded
CRASHES = toy_shared.CRASHES
MOMENTUM = {"lr": 0.1, "momentum": 0.9}
ADAMW = {"lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-3}
SMALL_NUMBER = "the factor is max_norm / (norm + 1e-6), as in torch's clip_grad_norm_, without the small number here"
LARGE_LIMIT, TINY = 1e6, 1e-8  # TINY: a norm beside which 1e-6 counts
LOST = 5  # the case in which the last rank has a nan: all ranks get it, and none waits for ever
NUMBERS = 5000  # bytes that clipping may send in a run: some numbers, and no gradients


def adamw(setting: ShardSetting, limits: list[float | None]) -> ShardSetting:
    return replace(setting, optimizer="AdamW", options=ADAMW, weight_decay=0.3, limits=limits)


WITH_SGD = replace(shared.ACCUMULATED, options=MOMENTUM, weight_decay=0.2, limits=[5.0, None])
ZERO_1, IN_HALF = adamw(shared.ACCUMULATED_1, [None, 3.0]), adamw(shared.HALF, [None, 5.0])
GATHERED = replace(shared.LARGE, options=MOMENTUM)


# --- what a rank does ---


@in_rank(uses=[TOY, SHARDED], preload=("steps",))
def clip(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield the norm that clip() returns in each case, and the gradients of the shards afterwards."""
    sharded = ShardedToy(context, lesson, inputs)
    for limit, gradients in zip(context.arguments["max_norms"], inputs["shards"], strict=True):
        for shard, gradient in zip(sharded.shards(), gradients, strict=True):
            shard.gradient = gradient.clone()
        value = sharded.optimizer.clip(limit)
        gradients_left = described("gradient", [shard.gradient for shard in sharded.shards()])
        is_tensor = isinstance(value, Tensor)
        yield gradients_left | {
            "norm": copy_of(value),
            "shape": list(value.shape) if is_tensor else type(value).__name__,
        }


@in_rank(uses=[TOY, SHARDED], preload=("steps",))
def take_steps(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield the parameters and the shards after each whole step."""
    sharded = ShardedToy(context, lesson, inputs)
    for step, limit in enumerate(context.arguments["limits"]):
        for _ in sharded.run_step(step):
            pass
        if limit is not None:
            sharded.optimizer.clip(limit)
        context.event("step")
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        shards = described("shard", [shard.values for shard in sharded.shards()])
        yield shards | {"parameters": sharded.parameters()}


@in_rank(join=False, preload=("steps",))
def train_alone(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield the parameters after each step of one process that has all of them, in float64."""
    arguments, parameters = context.arguments, [nn.Parameter(value.double()) for value in inputs["values"]]
    matrices, rest = ([p for p in parameters if (p.dim() >= 2) is large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": arguments["weight_decay"]}, {"params": rest, "weight_decay": 0.0}]
    reference = getattr(torch.optim, arguments["optimizer"])(groups, **arguments["options"])
    for gradients, limit in zip(inputs["gradients"], arguments["limits"], strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.double()
        if limit is not None:
            nn.utils.clip_grad_norm_(parameters, limit)
        for _ in range(arguments["times"]):
            reference.step()
        yield [copy_of(parameter) for parameter in parameters]


# --- clipping ---


def check_clip(grade: Grade, ranks: int, setting: ShardSetting) -> None:
    """Check that every rank gets the norm of all shards, and scales its own by the same factor of at most 1."""
    values = setting.initial(grade.seed)
    lengths = [setting.flat(bucket, values, ranks).shape[1] for bucket in setting.buckets()]
    inputs: list[Fields] = []
    for rank in range(ranks):  # the gradients of the last rank are larger, and of the last bucket, too
        generator = drawn.generator(grade.seed, 17, ranks, rank)
        scales = [(1 + rank) * (1 + i) for i in range(len(lengths))]
        draws = [
            [generator.normal(0, scale, size) for scale, size in zip(scales, lengths, strict=True)] for _ in range(6)
        ]
        draws[3] = [one * (rank < ranks - 1 or ranks == 1) for one in draws[3]]  # zeros on the last rank
        draws[4] = [one * TINY for one in draws[4]]
        if rank == ranks - 1:
            draws[LOST][-1][0] = np.nan
        inputs.append({"values": values, "shards": [[np.asarray(one, np.float32) for one in case] for case in draws]})
    norms = [norm([one for own in inputs for one in own["shards"][case]]) for case in range(LOST)] + [np.nan]
    max_norms = [norms[0] / 4, LARGE_LIMIT, norms[2] * 1.5, norms[3] / 2, norms[4] * 0.9, LARGE_LIMIT]
    result = run(grade, clip, inputs, shared.HINTS, max_norms=max_norms, **setting.arguments)
    for rank, cases in enumerate(result.values):
        for case, (got, right, max_norm) in enumerate(zip(cases, norms, max_norms, strict=True)):
            shards = [own["shards"][case] for own in inputs]
            where = f"{ranks} ranks, clip({max_norm:.5g}) on rank {rank}: "
            expected = {
                "shape": Expected([], "expected the norm as a tensor without dimensions, got {got}"),
                "norm": Expected(np.asarray(right), mistakes=mistakes_in_norm(shards, rank, max_norm)),
            }
            check(grade, where, got, expected, result)
            if case == LOST:
                continue
            factor = min(1.0, max_norm / (right + 1e-6))
            where += f"the norm is {right:.5g}: gradients must be multiplied by max_norm / (norm + 1e-6), at most 1; "
            for i, gradient in enumerate(shards[rank]):
                mistakes = {
                    f"{SMALL_NUMBER}: it counts beside a tiny norm": gradient * min(1.0, max_norm / right),
                    "the gradients are not scaled: scale them in place, in shard.gradient": gradient,
                    "the gradients are scaled up: the factor is at most 1": gradient * (max_norm / right),
                }
                scaled = Expected(gradient.astype(float) * factor, "", f"the gradient of shard {i}", mistakes)
                check(grade, where, got, {f"gradient {i}": scaled}, result)
    for calls in ([call for call in rank.calls if is_message(call)] for rank in result.ranks):
        if sum(call.price for call in calls) > NUMBERS:
            largest = max(calls, key=lambda call: call.price)
            grade.fail(
                f"{ranks} ranks: clip sends {int(largest.price)} bytes in {largest.name} ({largest.where}): each rank "
                "adds up the squares of its shards; send only this number"
            )


def mistakes_in_norm(shards: list[list[np.ndarray]], rank: int, max_norm: float) -> dict[str, np.ndarray]:
    """Return mistake -> the norm that it gives. `shards`: [rank][bucket]."""
    norms = np.asarray([[norm([one]) for one in own] for own in shards])
    of_ranks, of_buckets, right = (np.linalg.norm(norms, axis=1), np.linalg.norm(norms, axis=0), np.linalg.norm(norms))
    running = 0.0
    for bucket in of_buckets:
        running = running * len(shards) + bucket**2
    table = {
        "the total was summed over the ranks after every shard: sum it once, after the loop": running**0.5,
        "the norm is that of only this rank's shards: add up the squares of all ranks first": of_ranks[rank],
        "the norm is the sum of the ranks' norms: squares add up, norms do not": of_ranks.sum(),
        "the norm is the sum of the buckets' norms: squares add up, norms do not": of_buckets.sum(),
        "the norm is the sum of all shards' norms: squares add up, norms do not": norms.sum(),
        "the result is the square of the norm: take the square root at the end": right**2,
        "the norm is that of only the last bucket": of_buckets[-1],
        "the sum of squares was divided by the number of ranks": right / len(shards) ** 0.5,
        "the norm is the largest of the ranks' norms": of_ranks.max(),
        "the norm is that after clipping: return the norm before": min(right, max_norm),
    }
    return {sentence: np.asarray(value) for sentence, value in table.items() if not np.isclose(value, right)}


# --- steps ---


def alone(run: OptimizerRun, times: int = 1) -> list[list[np.ndarray]]:
    """Return the shards of each bucket at the start and after each step of one process, which updates `times` times."""
    setting = run.setting
    trained = [k for k in range(len(setting.shapes)) if k not in setting.frozen]
    # sums over micro-batches: [rank][step][parameter]
    sums = [[[sum(one) for one in zip(*micros, strict=True)] for micros in steps] for steps in run.computed]
    gradients = [[np.mean([steps[i][k] for steps in sums], axis=0) for k in trained] for i in range(len(setting.uses))]
    inputs = {"values": [run.initial[k] for k in trained], "gradients": gradients}
    (steps,) = run_alone(run.grade, train_alone, [inputs], times=times, **setting.arguments)
    after = [dict(zip(trained, values, strict=True)) for values in (inputs["values"], *steps)]
    return [[setting.flat(bucket, values, run.ranks) for bucket in run.buckets] for values in after]


def check_steps(grade: Grade, ranks: int, setting: ShardSetting) -> None:
    """Check that after every step all ranks have the parameters that one process would have."""
    steps_run = OptimizerRun(grade, ranks, setting, take_steps)
    right = alone(steps_run)
    for rank, value in enumerate(steps_run.result.values):
        for step, i in itertools.product(range(len(setting.uses)), range(len(steps_run.buckets))):
            check_bucket(steps_run, rank, step, i, [right[step][i], right[step + 1][i]])
        for step, k in itertools.product(range(len(setting.uses)), setting.frozen):
            frozen = Expected(steps_run.initial[k], f"parameter {k} is frozen, but changed", tolerance=EXACT)
            check(grade, f"step {step}, rank {rank}: ", {k: value[step]["parameters"][k]}, {k: frozen})


def check_bucket(run: OptimizerRun, rank: int, step: int, i: int, right: list[np.ndarray]) -> None:
    """Check the parameters of a bucket on a rank after a step. `right`: the shards before and after it."""
    before, after = right
    returned = run.result.values[rank][step]
    total = norm([before, after])
    got: Fields = {f"shard {i}": returned[f"shard {i}"]}
    expected: dict[str, Expected] = {}
    for j, shard in enumerate(run.setting.flat(run.buckets[i], returned["parameters"], run.ranks)):
        got[f"rank {j}'s shard"] = shard
        tolerance = once_in_bfloat16(after[j], 5 * total) if run.is_half(i) else Tolerance(total, 5.0)
        twice = "the shards were updated twice: one step() of the optimizer updates the shards of all buckets"
        never = "nothing has changed: step() updates this rank's shard first, then gathers the new values of all ranks"
        old = "only this rank's own shard is new: gather the shards of all ranks after the update"
        expected[f"rank {j}'s shard"] = Expected(
            after[j], mistakes={old: before[j]}, tolerance=tolerance,
            everywhere={twice: lambda j=j: alone(run, 2)[step + 1][i][j], never: before[j]},
        )  # fmt: skip
    kept = "the parameters are right, but shard.values is not: it keeps the float32 values that the optimizer updates"
    expected[f"shard {i}"] = Expected(after[rank], kept, tolerance=Tolerance(total, 5.0))
    where = f"step {step}, {run.ranks} ranks: in the parameters of bucket {i} on rank {rank}, "
    check(run.grade, where, got, expected, run.result)


def check_gather(grade: Grade, ranks: int, setting: ShardSetting) -> None:
    """Check that step() sends each rank's shard to all others once, and starts all messages before it waits."""
    steps_run = OptimizerRun(grade, ranks, setting, take_steps)
    size = sum(steps_run.bytes_of(i) for i in range(len(steps_run.buckets)))
    advice = "each rank sends its shard, in the parameters' dtype, and no more: all_gather"
    steps = [[one.calls for one in phases(steps_run.result, r) if one.event.name == "step"] for r in range(ranks)]
    for step, of_ranks in enumerate(zip(*steps, strict=True)):
        calls = [call for own in of_ranks for call in own]
        steps_run.check_price(calls, size, f"step {step}: for the new parameters", advice)
        for rank, own in enumerate(of_ranks):
            sends = [call for call in own if call.payload]
            check_together(
                grade, f"step {step}: rank {rank}", sends, "start the gathers of all buckets, then wait for each"
            )


# --- the graded tests ---


@graded("b.7")
def test_clip_takes_the_norm_of_all_shards_and_scales_by_at_most_1(grade: Grade) -> None:
    for ranks, setting in ((3, shared.ODD), (2, shared.LARGE), (4, shared.PLAIN), (1, shared.PLAIN)):
        check_clip(grade, ranks, setting)


@graded("b.7")
def test_after_each_step_all_ranks_have_the_parameters_of_one_process(grade: Grade) -> None:
    with_adamw = ((3, adamw(shared.ODD, [4.0, None, 6.0])), (4, ZERO_1), (2, IN_HALF), (1, adamw(shared.PLAIN, [3.0])))
    for ranks, setting in (with_adamw[0], (2, WITH_SGD), *with_adamw[1:]):
        check_steps(grade, ranks, setting)
    for ranks, setting in ((3, GATHERED), (2, IN_HALF), (4, ZERO_1)):
        check_gather(grade, ranks, setting)
    memory.check_divided(grade)


@graded("b.7", absence=True)
def test_the_sharded_optimizer_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
