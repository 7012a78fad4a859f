"""The memory of a sharded model, b.9 and b.10: its shards, two blocks while they compute, and gradients in transit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from grader import memory_limits
from grader.grading import Grade
from grader.in_rank import in_rank
from grader.memory_limits import Limit
from grader.ranks.calls import MEASUREMENT, Call
from grader.ranks.outcome import Result
from tests.beyond.sharded_model_shared import BLOCKS, HINTS
from tests.beyond.sharded_optimizer_memory import RANKS, SHAPE, STEPS, measure_start, run_measured
from tests.beyond.sharded_optimizer_shared import TOY
from tests.beyond.toy_shared import COPIES, MOST

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, torch
    from tests.beyond.sharded_model_in_rank import MeasuredModel, take_gradients_here

DEPTH = 7
WHOLE = 4 * math.prod(SHAPE)  # 1.3 MB, a block
SHARDS = DEPTH * WHOLE // RANKS
MESSAGE = WHOLE * (RANKS - 1) / RANKS  # bytes that a rank sends to gather a block, or of its gradients
MEANWHILE = "free a block after it has computed, and gather only one block ahead"
RELEASE_BEFORE = "; receive must release the tensors of a message before many others are sent"
REFERENCE = "is there still a reference to whole parameters or gradients?"
WITHOUT_GRADIENTS = "without gradients, free every block after it has computed (torch.is_grad_enabled)"
RELEASE = "free every block when it is sent, and release the tensors of the message when it is received; a gradient "
RELEASE += "that is a view of `received` keeps all of it"


@in_rank(uses=[measure_start, TOY, BLOCKS], preload=("steps",), first="measure_start")
def measured_steps(context: Context, lesson: Any, inputs: Any) -> None:
    """Take some steps with momentum, with or without the student's exchange of gradients; then evaluate once."""
    arguments = context.arguments
    model = MeasuredModel(arguments["shape"], arguments["depth"], context.measure)
    if not arguments["exchanges"]:
        take_gradients_here(lesson, lambda block: 1)

    def make_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    sharded = lesson.ShardedModel(model, model.blocks, make_optimizer)
    context.measure("made")
    for step in range(arguments["steps"]):
        torch.autograd.backward(model(step))
        if arguments["exchanges"]:
            sharded.finish()
        else:
            for piece in sharded.pieces:
                piece.free()
                piece.shard.gradient = torch.ones_like(piece.shard.values)
        context.measure(f"{step} gradients")
        sharded.step()
        sharded.zero_grad()
        context.measure(f"{step} ended")
    with torch.no_grad():
        model(arguments["steps"])
    context.measure("evaluated")


class Point(NamedTuple):
    """A point of measurement: how much ranks may have in memory, and how many messages they have sent before."""

    limit: Limit
    messages: int


def points(exchanges: bool) -> list[Point]:
    """Return all points, first those between steps: what is kept there is also in memory while blocks compute."""
    between = [point("made", "after ShardedModel is made", {}, 0, "free every block when its shard is copied")]
    sent = 0  # messages before this point
    blocks = list[Point]()
    state = dict[str, int]()
    for step in range(STEPS):
        for i in range(DEPTH):
            when, parts = f"while block {i} computes in forward of step {step}", state | {"two blocks": 2 * WHOLE}
            blocks.append(point(f"{step} forward {i}", when, parts, sent + min(i + 2, DEPTH), MEANWHILE))
        sent += DEPTH
        for i in reversed(range(DEPTH)):
            when, parts = f"while block {i} computes in backward of step {step}", state | {"two blocks": 2 * WHOLE}
            before, advice = DEPTH - 1 - i if exchanges else 0, MEANWHILE  # blocks whose gradients have been sent
            if before:
                parts |= {"gradients of its shards": before * WHOLE // RANKS}
                parts |= {"messages in transit": COPIES * WHOLE * min(before, MOST)}
                advice += RELEASE_BEFORE
            blocks.append(point(f"{step} backward {i}", when, parts, sent + min(DEPTH - i, DEPTH - 1) + before, advice))
        sent += DEPTH - 1 + (DEPTH if exchanges else 0)
        parts = state | {"gradients": SHARDS}
        between.append(point(f"{step} gradients", f"after finish of step {step}", parts, sent, RELEASE))
        state = {"state of the optimizer": SHARDS}
        between.append(point(f"{step} ended", f"after step {step}", state, sent, REFERENCE))
    between.append(point("evaluated", "after an evaluation", state, sent + DEPTH, WITHOUT_GRADIENTS))
    return [*between, *blocks]


def point(name: str, when: str, parts: dict[str, int], messages: int, advice: str) -> Point:
    return Point(Limit(name, when, {"shards": SHARDS} | parts, advice), messages)


def check_model(grade: Grade, exchanges: bool) -> None:
    """Check at every point that a rank has no more in memory than it needs, and has sent what it had to send."""
    expected = points(exchanges)

    def measure(attempt: int) -> Result:
        result = run_measured(
            grade, measured_steps, HINTS, shape=SHAPE, depth=DEPTH, exchanges=exchanges, attempt=attempt
        )
        check_sent_before(grade, result, expected)
        return result

    memory_limits.check(grade, measure, [one.limit for one in expected], WHOLE // 5)


def check_sent_before(grade: Grade, result: Result, expected: list[Point]) -> None:
    """Check that ranks measure where they say, and do not free blocks for a measurement and gather them again."""
    for rank in result.ranks:
        sent, at = 0.0, dict[str, float]()
        for event in rank.events:
            if event.name == MEASUREMENT:
                at[event.data["point"]] = sent
            elif isinstance(event, Call):
                sent += event.price
        for limit, messages in expected:
            if abs(at.get(limit.point, 0.0) - messages * MESSAGE) > 0.01 * MESSAGE:
                grade.fail(
                    f"{limit.when}, rank {rank.rank} has sent {at.get(limit.point, 0.0) / MESSAGE:.2f} messages of a "
                    f"block so far, expected {messages}: gather each block once in forward and once in backward"
                )
