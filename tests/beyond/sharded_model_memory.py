"""The memory of a sharded model, b.9 and b.10: its shards, two blocks while they compute, and gradients in transit."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from grader import memory_limits
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank
from grader.memory_limits import Limit
from grader.ranks.outcome import Result
from grader.wire.values import Fields
from tests.beyond.sharded_model_shared import BLOCKS, HINTS
from tests.beyond.sharded_optimizer_memory import RANKS, SHAPE, STEPS, ends, measure_start, run_measured
from tests.beyond.sharded_optimizer_shared import TOY
from tests.beyond.toy_shared import COPIES, MOST

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, torch
    from tests.beyond.sharded_model_in_rank import MeasuredModel, take_gradients_here

DEPTH, RATE, MOMENTUM = 7, 0.01, 0.9
WHOLE = 4 * math.prod(SHAPE)  # 1.3 MB, a block
SHARDS = DEPTH * WHOLE // RANKS
MEANWHILE = "free a block after it has computed, and gather only one block ahead"
RELEASE_BEFORE = "; receive must release the tensors of a message before many others are sent"
REFERENCE = "is there still a reference to whole parameters or gradients?"
WITHOUT_GRADIENTS = "without gradients, free every block after it has computed (torch.is_grad_enabled)"
RELEASE = "free every block when it is sent, and release the tensors of the message when it is received; a gradient "
RELEASE += "that is a view of `received` keeps all of it"


@in_rank(uses=[measure_start, ends, TOY, BLOCKS], preload=("steps",), first="measure_start")
def measured_steps(context: Context, lesson: ModuleType, inputs: Fields) -> list[list[float]]:
    """Take some steps with momentum, with or without the student's exchange of gradients; then evaluate once.

    Return the ends of the parameters that blocks compute with: forward and backward of each step, and the evaluation.
    """
    arguments = context.arguments
    model = MeasuredModel(arguments["shape"], inputs["factors"], context.measure)
    if not arguments["exchanges"]:
        take_gradients_here(lesson, lambda block: 1)

    def make_optimizer(groups: list[Fields]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=arguments["rate"], momentum=arguments["momentum"])

    sharded = lesson.ShardedModel(model, model.blocks, make_optimizer)
    context.measure("made")
    for step in range(arguments["steps"]):
        torch.autograd.backward(model(step))
        if arguments["exchanges"]:
            sharded.finish()
        else:
            for piece, factor in zip([*sharded.blocks, sharded.root], [*inputs["factors"][step], 1.0], strict=True):
                piece.free()
                piece.shard.gradient = torch.full_like(piece.shard.values, factor)
        context.measure(f"{step} gradients")
        sharded.step()
        sharded.zero_grad()
        context.measure(f"{step} ended")
    with torch.no_grad():
        model(arguments["steps"])
    context.measure("evaluated")
    return model.ends


def limits_of(exchanges: bool) -> list[Limit]:
    """Return all points, first those between steps: what is kept there is also in memory while blocks compute."""
    between = [limit("made", "after ShardedModel is made", {}, "free every block when its shard is copied")]
    computing = list[Limit]()
    state = dict[str, int]()
    for step in range(STEPS):
        two = state | {"two blocks": 2 * WHOLE}
        for i in range(DEPTH):
            computing.append(limit(f"{step} forward {i}", f"while block {i} computes in forward of step {step}", two))
        for i in reversed(range(DEPTH)):
            parts, advice = dict(two), MEANWHILE
            if sent := DEPTH - 1 - i if exchanges else 0:  # blocks whose gradients have been sent
                parts |= {"gradients of its shards": sent * WHOLE // RANKS}
                parts |= {"messages in transit": COPIES * WHOLE * min(sent, MOST)}
                advice += RELEASE_BEFORE
            when = f"while block {i} computes in backward of step {step}"
            computing.append(limit(f"{step} backward {i}", when, parts, advice))
        parts = state | {"gradients": SHARDS}
        between.append(limit(f"{step} gradients", f"after finish of step {step}", parts, RELEASE))
        state = {"state of the optimizer": SHARDS}
        between.append(limit(f"{step} ended", f"after step {step}", state, REFERENCE))
    between.append(limit("evaluated", "after an evaluation", state, WITHOUT_GRADIENTS))
    return [*between, *computing]


def limit(point: str, when: str, parts: dict[str, int], advice: str = MEANWHILE) -> Limit:
    return Limit(point, when, {"shards": SHARDS} | parts, advice)


def check_model(grade: Grade, exchanges: bool) -> None:
    """Check at every point that a rank has no more in memory than it needs."""

    def measure(attempt: int) -> Result:
        arguments = {"shape": SHAPE, "exchanges": exchanges, "rate": RATE, "momentum": MOMENTUM, "attempt": attempt}
        return run_measured(grade, measured_steps, check_values, DEPTH, HINTS, **arguments)

    def check_values(result: Result, factors: np.ndarray) -> None:
        """Check the parameters that blocks compute with: every rank's shard has moved by factors of its own."""
        gradients = factors.mean(axis=0, keepdims=True) if exchanges else factors
        value, momentum, rows = np.ones(gradients[:, 0].shape), np.zeros(gradients[:, 0].shape), []
        for step, _ in itertools.product(range(STEPS), ("forward", "backward")):
            rows.append([value.min(axis=0), value.max(axis=0)])
            if len(rows) % 2 == 0:
                momentum = MOMENTUM * momentum + gradients[:, step]
                value = value - RATE * momentum
        rows.append([value.min(axis=0), value.max(axis=0)])
        right = [np.transpose(row)[:: -1 if place % 2 else 1] for place, row in enumerate(rows)]  # backward: last first
        name = "what each block computes with in the run that measures memory"
        expected = {"": Expected(np.concatenate(right), name=name)}
        for rank, got in enumerate(result.values):
            check(grade, f"rank {rank}, smallest and largest number: ", {"": np.asarray(got)}, expected, result)

    memory_limits.check(grade, measure, limits_of(exchanges), WHOLE // 5)
