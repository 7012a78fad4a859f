"""Judges the memory of a sharded optimizer: every rank has the whole model, and its own part of everything else."""

import math

from grader.checks.beyond.sharded_model import memory_limits
from grader.checks.beyond.sharded_model.memory_limits import Limit
from grader.grading import Grade
from grader.ranks.outcome import Result

RANKS, STEPS = 4, 2
SHAPES = [[320, 1024]] * 4  # 1.3 MB each


def check_divided(grade: Grade) -> None:
    """The optimizer's state and the gradients are those of the rank's shard alone."""

    def run(attempt: int) -> Result:
        return grade.run(
            "grader.probes.beyond.sharded_state:steps",
            RANKS,
            deadline=memory_limits.MEASURED_DEADLINE,
            shapes=SHAPES,
            steps=STEPS,
            measures=True,
            attempt=attempt,
        )

    whole = 4 * sum(map(math.prod, SHAPES))
    shard, limits = whole // RANKS, list[Limit]()
    for step in range(STEPS):
        state = {"state of Adam": 2 * shard} if step else {}
        parts = {"parameters": whole, "gradients": shard} | state
        advice = (
            "release the gradients of all parameters and the tensors of the messages once the messages are received"
        )
        limits.append(Limit(f"{step} gradients", f"after finish of step {step}", parts, advice))
        parts = {"parameters": whole, "state of Adam": 2 * shard}
        advice = "keep optimizer state only for this rank's shards; is there still a reference to the gradients?"
        limits.append(Limit(f"{step} ended", f"after step {step}", parts, advice))
    memory_limits.check(grade, run, limits, shard)  # what is kept by mistake is a whole model or more
