"""ZeRO-3, b.10: each shard gets its mean gradient; a complete block is sent at once, and its memory is freed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from grader.arithmetic import Tolerance, norm
from grader.compare import Expected, check
from grader.grading import Grade
from tests.beyond import sharded_model_memory as memory
from tests.beyond import sharded_model_shared as shared
from tests.beyond.sharded_model_checks import check_costs, check_in_memory, check_messages, check_values
from tests.beyond.sharded_model_shared import ModelRun
from tests.beyond.sharded_optimizer_shared import check_means, check_none_left

graded = pytest.mark.graded


def check_updates(run: ModelRun) -> None:
    """Check that a step changes every shard as the optimizer would change the whole model, in float32."""
    for rank, value in enumerate(run.result.values):
        for step, got in enumerate(value["steps"]):
            for i in range(len(run.buckets)):
                right, total = np.asarray(run.shards[step + 1][i][rank]), norm([one[i] for one in run.shards])
                name = f"shard.values of {run.name(i)}"
                expected = {
                    f"shard {i}'s dtype": Expected("float32", f"{name} is of {{got}}, expected float32"),
                    f"shard {i}": Expected(right, name=name, tolerance=Tolerance(total)),
                }
                check(run.grade, f"after step {step}, rank {rank}: ", got, expected, run.result)


@graded("b.10")
def test_every_shard_gets_the_mean_gradient_and_steps_as_the_whole_model_does(grade: Grade) -> None:
    for ranks, setting in (*shared.TRAINED, (3, shared.UNUSED), (3, shared.SPECIAL)):
        run = ModelRun(grade, ranks, setting)
        check_none_left(run)
        check_means(run, partial(check_messages, run))
        check_updates(run)
        check_values(run)


@graded("b.10")
def test_a_block_s_gradients_leave_as_soon_as_they_are_complete_and_no_hook_waits(grade: Grade) -> None:
    for ranks, setting in ((3, shared.PLAIN), (2, shared.ODD), (3, shared.UNUSED), (2, shared.HALF), (3, shared.LATE)):
        run = ModelRun(grade, ranks, setting)
        check_messages(run)
        check_costs(run)


@graded("b.10")
def test_between_steps_a_rank_has_only_its_shards_in_memory(grade: Grade) -> None:
    check_in_memory(ModelRun(grade, 3, shared.PLAIN))
    memory.check_model(grade, exchanges=True)
