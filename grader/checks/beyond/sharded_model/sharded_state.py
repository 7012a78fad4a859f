"""Judges the memory of a sharded optimizer: every rank has the whole model, and its own part of everything else."""

import math
from functools import partial

from grader.checks.beyond.in_transit import COPIES, MOST
from grader.checks.beyond.sharded_model import memory_limits
from grader.checks.beyond.sharded_model.memory_limits import Limit
from grader.grading import Grade
from grader.ranks.outcome import Result

RANKS, STEPS = 4, 2
SHAPES = [[320, 1024]] * 6  # 1.3 MB each
BLOCK = 4 * math.prod(SHAPES[0])
WHOLE = BLOCK * len(SHAPES)
SHARD = WHOLE // RANKS
POOL = 2 * BLOCK * MOST  # buffers that may be kept for the next messages; what is kept by mistake is larger
RELEASE = "receive() must release the tensors of a message and its handle: set the attributes that hold them to None"


def check_divided(grade: Grade) -> None:
    """ZeRO-1: the optimizer's state and the gradients are those of the rank's shard alone."""
    limits = list[Limit]()
    for step in range(STEPS):
        state = {"state of Adam": 2 * SHARD} if step else {}
        parts = {"parameters": WHOLE, "gradients": SHARD} | state
        limits.append(Limit(f"{step} gradients", f"after finish of step {step}", parts, RELEASE))
        parts = {"parameters": WHOLE, "state of Adam": 2 * SHARD}
        advice = "keep optimizer state only for this rank's shards; is there still a reference to the gradients?"
        limits.append(Limit(f"{step} ended", f"after step {step}", parts, advice))
    memory_limits.check(grade, partial(_run, grade, 1), limits, POOL)


def check_messages(grade: Grade) -> None:
    """ZeRO-2: a message's memory is released before many others are sent, and after finish() all but a pool."""
    limits = list[Limit]()
    for step in range(STEPS):
        parts = {"parameters": WHOLE, "gradients of its shards": SHARD}
        sent = parts | {"messages in transit": COPIES * BLOCK * MOST - POOL}
        limits.append(Limit(f"{step} backward", f"at the end of backward of step {step}", sent, RELEASE))
        limits.append(Limit(f"{step} gradients", f"after finish of step {step}", parts, RELEASE))
    memory_limits.check(grade, partial(_run, grade, 2), limits, POOL)


def _run(grade: Grade, stage: int, attempt: int) -> Result:
    return grade.run(
        "grader.probes.beyond.sharded_state:steps", RANKS, deadline=memory_limits.MEASURED_DEADLINE,
        shapes=SHAPES, stage=stage, steps=STEPS, measures=True, attempt=attempt,
    )  # fmt: skip
