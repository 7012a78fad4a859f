"""The memory of a sharded optimizer, b.6 and b.7: the whole model, and this rank's part of everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grader import memory_limits
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.memory_limits import Limit
from grader.ranks.outcome import Result
from grader.wire.request import RankFunction
from grader.wire.values import Fields
from tests.beyond.toy_shared import COPIES, MOST

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, nn, torch

RANKS, STEPS = 4, 2
SHAPE, BLOCKS = [320, 1024], 8  # so many that what they keep of every message is more than POOL
BLOCK = 4 * math.prod(SHAPE)  # 1.3 MB
WHOLE = BLOCK * BLOCKS
SHARD = WHOLE // RANKS
POOL = 2 * BLOCK * MOST  # buffers that may be kept for the next messages; a mistake keeps more
RELEASE = "receive() must release the tensors of a message and its handle: set the attributes that hold them to None; "
RELEASE += "a gradient that is a view of `received` keeps all of it"


def measure_start(context: Context) -> None:
    context.measure("start")


@in_rank(uses=[measure_start], preload=("steps",), first="measure_start")
def measured_steps(context: Context, lesson: ModuleType, inputs: Fields) -> None:
    """Run some steps with Adam, one block after the other; with stage 2, only the exchange of gradients."""
    arguments = context.arguments
    shapes = [arguments["shape"]] * arguments["blocks"]
    model = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(shape))]) for shape in [*shapes, [3]]])
    blocks = list(model)[:-1]

    def make_optimizer(groups: list[Fields]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=0.01)

    sharded = lesson.ShardedOptimizer(model, blocks, make_optimizer, stage=arguments["stage"])
    for step in range(arguments["steps"]):
        for block in [*reversed(blocks), model[-1]]:
            next(block.parameters()).sum().backward()
        context.measure(f"{step} backward")
        sharded.finish()
        context.measure(f"{step} gradients")
        if arguments["stage"] == 1:
            sharded.step()
        sharded.zero_grad()
        context.measure(f"{step} ended")


def check_divided(grade: Grade) -> None:
    """Check for ZeRO-1 that a rank has optimizer state and gradients only of its own shard."""
    advice = "keep optimizer state only for this rank's shards; is there still a reference to the gradients?"
    limits = list[Limit]()
    for step in range(STEPS):
        parts = {"parameters": WHOLE, "gradients": SHARD, "state of Adam": 2 * SHARD if step else 0}
        limits.append(Limit(f"{step} gradients", f"after finish of step {step}", parts, RELEASE))
        parts = {"parameters": WHOLE, "state of Adam": 2 * SHARD}
        limits.append(Limit(f"{step} ended", f"after step {step}", parts, advice))
    check_memory(grade, 1, limits)


def check_messages(grade: Grade) -> None:
    """Check for ZeRO-2 that a message's memory is soon released, and after finish() all but a pool of buffers."""
    limits = list[Limit]()
    for step in range(STEPS):
        parts = {"parameters": WHOLE, "gradients of its shards": SHARD}
        sent = parts | {"messages in transit": COPIES * BLOCK * MOST - POOL}
        limits.append(Limit(f"{step} backward", f"at the end of backward of step {step}", sent, RELEASE))
        limits.append(Limit(f"{step} gradients", f"after finish of step {step}", parts, RELEASE))
    check_memory(grade, 2, limits)


def check_memory(grade: Grade, stage: int, limits: list[Limit]) -> None:
    def measure(attempt: int) -> Result:
        return run_measured(grade, measured_steps, shape=SHAPE, blocks=BLOCKS, stage=stage, attempt=attempt)

    memory_limits.check(grade, measure, limits, POOL)


def run_measured(
    grade: Grade, function: RankFunction, hints: Mapping[str, str] | None = None, **arguments: Any
) -> Result:
    """Run a function that measures on every rank."""
    return run(
        grade, function, [{}] * RANKS, hints, payloads=False, deadline=memory_limits.MEASURED_DEADLINE, steps=STEPS,
        measures=True, **arguments,
    )  # fmt: skip
