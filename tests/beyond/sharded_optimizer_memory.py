"""The memory of a sharded optimizer, b.6 and b.7: the whole model, and this rank's part of everything else.

What is measured must also compute: every rank has factors of its own for its gradients, and from them follow the
smallest and the largest value of each shard and parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from grader import memory_limits
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.memory_limits import Limit
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.request import RankFunction
from grader.wire.values import Fields
from tests.beyond.toy_shared import COPIES, MOST

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, Tensor, nn, torch

RANKS, STEPS = 4, 2
SHAPE, BLOCKS = [320, 1024], 8  # so many that what they keep of every message is more than POOL
BLOCK = 4 * math.prod(SHAPE)  # 1.3 MB
WHOLE = BLOCK * BLOCKS
SHARD = WHOLE // RANKS
POOL = 2 * BLOCK * MOST  # buffers that may be kept for the next messages; a mistake keeps more
RATE, BETAS = 0.01, (0.9, 0.999)  # of Adam
RELEASE = "receive() must release the tensors of a message and its handle: set the attributes that hold them to None; "
RELEASE += "a gradient that is a view of `received` keeps all of it"


def measure_start(context: Context) -> None:
    context.measure("start")


def ends(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the smallest and the largest number of each tensor: to compute them takes no memory."""
    return [[float(tensor.min()), float(tensor.max())] for tensor in tensors]


@in_rank(uses=[measure_start, ends], preload=("steps",), first="measure_start")
def measured_steps(context: Context, lesson: ModuleType, inputs: Fields) -> Fields:
    """Run some steps with Adam, one block after the other; with stage 2, only the exchange of gradients.

    Return the `ends` of the shards' gradients after each finish(), and of the blocks at the end.
    """
    arguments = context.arguments
    shapes = [arguments["shape"]] * arguments["blocks"]
    model = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(shape))]) for shape in [*shapes, [3]]])
    blocks = list(model)[:-1]

    def make_optimizer(groups: list[Fields]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=arguments["rate"], betas=arguments["betas"])

    gradients = []
    sharded = lesson.ShardedOptimizer(model, blocks, make_optimizer, stage=arguments["stage"])
    for step in range(arguments["steps"]):
        for block, factor in zip([*reversed(blocks), model[-1]], inputs["factors"][step], strict=True):
            (next(block.parameters()).sum() * factor).backward()
        context.measure(f"{step} backward")
        sharded.finish()
        context.measure(f"{step} gradients")
        gradients.append(ends([bucket.shard.gradient for bucket in sharded.buckets[:-1]]))
        if arguments["stage"] == 1:
            sharded.step()
        sharded.zero_grad()
        context.measure(f"{step} ended")
    parameters = [next(block.parameters()) for block in reversed(blocks)]
    return {"gradients": torch.tensor(gradients), "parameters": torch.tensor(ends(parameters))}


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
        return run_measured(
            grade, measured_steps, check_values, factors=BLOCKS + 1, attempt=attempt, shape=SHAPE, blocks=BLOCKS,
            stage=stage, rate=RATE, betas=BETAS,
        )  # fmt: skip

    def check_values(result: Result, factors: np.ndarray) -> None:
        """Check the mean gradients, and the blocks as Adam has left them; with stage 2 they stay what they are."""
        gradients = factors.mean(axis=0)[:, :BLOCKS]
        parameters = np.ones(BLOCKS)
        first, second = np.zeros(BLOCKS), np.zeros(BLOCKS)
        for step, gradient in enumerate(gradients if stage == 1 else (), 1):
            first += (1 - BETAS[0]) * (gradient - first)
            second += (1 - BETAS[1]) * (gradient**2 - second)
            change = first / (1 - BETAS[0] ** step) / (np.sqrt(second / (1 - BETAS[1] ** step)) + 1e-8)
            parameters -= RATE * change
        expected = {
            name: Expected(np.stack([right, right], axis=-1), name=f"{words} in the run that measures memory")
            for name, right, words in (
                ("gradients", gradients, "shard.gradient"), ("parameters", parameters, "each block"),
            )
        }  # fmt: skip
        for rank, value in enumerate(result.values):
            check(grade, f"rank {rank}, smallest and largest number: ", value, expected, result)

    memory_limits.check(grade, measure, limits, POOL)


def run_measured(
    grade: Grade, function: RankFunction, check_values: Callable[[Result, np.ndarray], None], factors: int,
    hints: Mapping[str, str] | None = None, **arguments: Any,
) -> Result:  # fmt: skip
    """Run a function that measures on every rank, and check what it computes with the factors, (ranks, steps, n)."""
    draws = np.stack([drawn.generator(grade.seed, 19, r).uniform(0.5, 1.5, (STEPS, factors)) for r in range(RANKS)])
    result = run(
        grade, function, [{"factors": own.tolist()} for own in draws], hints, payloads=False,
        deadline=memory_limits.MEASURED_DEADLINE, steps=STEPS, measures=True, **arguments,
    )  # fmt: skip
    check_values(result, draws)
    return result
