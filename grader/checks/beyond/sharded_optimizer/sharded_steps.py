"""Judges steps: the parameters that every rank must have after each, and what their gather costs.

The optimizers are computed here in numpy, for all parameters in one process and in float64.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from grader.arithmetic import difference
from grader.checks import reference
from grader.checks.beyond.sharded_optimizer import sharded_messages, sharded_settings
from grader.checks.beyond.sharded_optimizer.sharded_run import OptimizerRun, OptimizerSetting, students_call
from grader.compare import forgotten_waits
from grader.grading import Grade
from grader.ranks.calls import Call

STATES = {"AdamW": 2, "SGD": 1}  # numbers that the optimizer keeps for each element
ROUGH = 50.0  # slack in which a known wrong value is recognised
Update = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # (values, gradient, decay) -> values


def adamw(options: dict) -> Callable[[], Update]:
    """A fresh AdamW with decoupled weight decay, for one array."""
    lr, (b1, b2), eps = options["lr"], options["betas"], options["eps"]

    def fresh() -> Update:
        state = {"count": 0, "mean": 0.0, "square": 0.0}

        def update(values: np.ndarray, gradient: np.ndarray, decay: np.ndarray) -> np.ndarray:
            state["count"] += 1
            state["mean"] = b1 * state["mean"] + (1 - b1) * gradient
            state["square"] = b2 * state["square"] + (1 - b2) * gradient**2
            mean, square = state["mean"] / (1 - b1 ** state["count"]), state["square"] / (1 - b2 ** state["count"])
            return values * (1 - lr * decay) - lr * mean / (np.sqrt(square) + eps)

        return update

    return fresh


def sgd(options: dict) -> Callable[[], Update]:
    """A fresh SGD with momentum and weight decay, for one array."""
    lr, momentum = options["lr"], options["momentum"]

    def fresh() -> Update:
        state = {"velocity": 0.0}

        def update(values: np.ndarray, gradient: np.ndarray, decay: np.ndarray) -> np.ndarray:
            state["velocity"] = momentum * state["velocity"] + gradient + decay * values
            return values - lr * state["velocity"]

        return update

    return fresh


class Expected:
    """values[step][bucket]: (n, L), the shards after a step; values[0] is the start."""

    def __init__(self, run: OptimizerRun, times: int = 1) -> None:
        """`times`: how often a step updates, for a student who does so more than once."""
        setting = run.setting
        kind = adamw if setting.optimizer == "AdamW" else sgd
        updates = [kind(setting.options)() for _ in run.buckets]
        ones = [np.ones(shape) if len(shape) > 1 else np.zeros(shape) for shape in setting.shapes]
        decays = [setting.weight_decay * setting.flat(bucket, ones, run.n) for bucket in run.buckets]
        self.values = [[setting.flat(bucket, run.initial, run.n) for bucket in run.buckets]]
        for step, micros in enumerate(setting.uses):
            gradients = [run.mean(step, len(micros) - 1, i) for i in range(len(run.buckets))]
            limit = setting.limits[step] if setting.limits else None
            if limit is not None:
                norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients))
                gradients = [gradient * min(1.0, limit / (norm + 1e-6)) for gradient in gradients]
            now = self.values[-1]
            for _ in range(times):
                now = [update(*rest) for update, *rest in zip(updates, now, gradients, decays, strict=True)]
            self.values.append(now)


def check_steps(grade: Grade, n: int, setting: OptimizerSetting) -> None:
    """After every step all ranks have the parameters that one process would have, and state for their shards alone."""
    run = OptimizerRun(grade, n, setting, "steps")
    expected = Expected(run).values
    for rank, value in enumerate(run.result.values):
        for step, told in enumerate(value["steps"]):
            for k in setting.frozen:
                if not np.array_equal(told["parameters"][k], run.initial[k]):
                    grade.fail(f"step {step}: parameter {k} is frozen, but changed on rank {rank}")
            for i in range(len(run.buckets)):
                _check_bucket(run, rank, step, i, told, expected)
        elements = sum(one.shape[1] for one in expected[0]) * STATES[setting.optimizer]
        if value["state"] != elements:
            grade.fail(
                f"{n} ranks: the optimizers of rank {rank} have state for {value['state']} elements, expected "
                f"{elements}: {STATES[setting.optimizer]} for each element of this rank's shards"
            )


def _check_bucket(run: OptimizerRun, rank: int, step: int, i: int, told: dict, expected: list) -> None:
    bucket, right = run.buckets[i], expected[step + 1][i]
    sizes = [run.initial[k].size for k in bucket]
    got = np.zeros(right.size)
    got[: sum(sizes)] = np.concatenate([np.ravel(told["parameters"][k]) for k in bucket])
    got = got.reshape(right.shape)
    half = run.setting.dtype(bucket[0]) == "bfloat16"
    where = f"step {step}, {run.n} ranks"
    own = told["shards"][i]
    total = float(np.linalg.norm(right))
    wrong = [j for j in range(run.n) if not _close(got[j], right[j], total, half)]
    if wrong:
        cause = forgotten_waits(run.result) or _name_step(run, rank, step, i, wrong, got, expected)
        words = difference(f"rank {wrong[0]}'s shard", got[wrong[0]], right[wrong[0]])
        run.grade.fail(f"{cause}\n{where}: in the parameters of bucket {i} on rank {rank}, {words}")
    if "type" in own or not reference.close(own["values"], right[rank], total, 5.0):
        run.grade.fail(
            f"{where}: the parameters of bucket {i} are right, but shard.values of rank {rank} are not: the shard "
            "keeps the float32 values that the optimizer updates"
        )


def _close(got: np.ndarray, right: np.ndarray, total: float, half: bool) -> bool:
    """Of bfloat16 parameters, the nearest number of this dtype."""
    if not half:
        return reference.close(got, right, total, 5.0)
    return bool(np.all(np.abs(got - right) <= 2.0**-8 * np.abs(right) + 1e-5))


def _name_step(
    run: OptimizerRun, rank: int, step: int, i: int, wrong: list[int], got: np.ndarray, expected: list
) -> str:
    """The mistake that leaves these parameters; in general words if it is no known one."""
    right, before, n = expected[step + 1][i], expected[step][i], run.n
    total = float(np.linalg.norm(right))

    def is_(j: int, value: np.ndarray) -> bool:
        return reference.close(got[j], value, total, ROUGH)

    twice = Expected(run, times=2).values[step + 1][i]
    if all(is_(j, twice[j]) for j in range(n)):
        return "the shards were updated twice: one step() of the optimizer updates the shards of all buckets"
    if all(is_(j, before[j]) for j in range(n)):
        return "nothing has changed: step() updates this rank's shard first, then gathers the new values of all ranks"
    moved = [j for j in range(n) if not is_(j, before[j])]
    if moved == [rank] and wrong != [rank]:
        return "only this rank's own shard is new: gather the shards of all ranks after the update"
    if all(is_(j, before[j]) for j in wrong):
        return f"the shard of rank {wrong[0]} is still the one before the step: gather after the update, on all ranks"
    for j in wrong:
        for other in range(n):
            if other != j and is_(j, right[other]):
                return f"rank {other}'s shard is in the place of rank {j}'s: keep the shards in rank order"
    return "the parameters are not those of one process that takes the same step"


def check_gather(grade: Grade) -> None:
    """step() sends each rank's shard to all others once, and starts all messages before it waits for one."""
    cases = [sharded_settings.GATHERED, (2, sharded_settings.TRAINED[3][1]), (4, sharded_settings.TRAINED[2][1])]
    for n, setting in cases:
        run = OptimizerRun(grade, n, replace(setting), "steps")
        size = sum(run.bytes_of(i) for i in range(len(run.buckets)))
        steps = [_calls_of_steps(run, rank) for rank in range(n)]
        halves = sum(setting.dtype(bucket[0]) == "bfloat16" for bucket in run.buckets)
        for step, calls in enumerate(zip(*steps, strict=True)):
            every = [call for mine in calls for call in mine]
            advice = "each rank sends its shard, in the parameters' dtype, and no more: all_gather"
            sharded_messages.check_price(run, every, size, f"step {step}: for the new parameters", advice)
            widened = [call for call in every if call.payload and call.dtype == "float32"]
            if halves and len(widened) > n * (len(run.buckets) - halves):
                grade.fail(
                    f"step {step}: parameters in bfloat16 are gathered in float32 ({widened[0].where}): send a shard "
                    "in the dtype of flat.values"
                )
            for call in every:
                if call.payload and not call.asynchronous and call.price > sharded_messages.SMALL:
                    grade.fail(
                        f"rank {call.rank} waits in {call.name} #{call.number} ({call.where}): start the gathers of "
                        "all buckets with async_op=True, then wait for each"
                    )


def _calls_of_steps(run: OptimizerRun, rank: int) -> list[list[Call]]:
    """What a rank has sent from the begin of each step() to the next backward."""
    found, inside = list[list[Call]](), False
    for event in run.result.ranks[rank].events:
        if event.name in ("step", "backward"):
            inside = event.name == "step"
            found += [[]] if inside else []
        elif inside and isinstance(event, Call) and students_call(event):
            found[-1].append(event)
    return found
