"""ZeRO-3, b.9: every block computes with the parameters of all ranks, and the next one is gathered meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grader.grading import Grade
from tests.beyond import sharded_model_memory as memory
from tests.beyond import sharded_model_shared as shared
from tests.beyond.sharded_model_checks import check_costs, check_in_memory, check_messages, check_values
from tests.beyond.sharded_model_shared import ModelRun, ModelSetting

graded = pytest.mark.graded


def gathering(grade: Grade, ranks: int, setting: ModelSetting) -> ModelRun:
    """Run a model without the student's exchange of gradients."""
    return ModelRun(grade, ranks, replace(setting, exchanges=False))


@graded("b.9")
def test_every_block_computes_with_the_whole_parameters(grade: Grade) -> None:
    for ranks, setting in shared.TRAINED:
        check_values(gathering(grade, ranks, setting))


@graded("b.9")
def test_the_next_block_is_gathered_while_this_one_computes_and_nothing_waits(grade: Grade) -> None:
    for setting in (shared.PLAIN, shared.HALF, shared.LATE):
        run = gathering(grade, 3, setting)
        check_messages(run)
        check_costs(run)


@graded("b.9")
def test_without_gradients_every_block_is_freed(grade: Grade) -> None:
    run = gathering(grade, 2, shared.ODD)
    check_in_memory(run)
    check_values(run)
    check_messages(run)


@graded("b.9")
def test_at_most_two_blocks_are_in_memory(grade: Grade) -> None:
    check_in_memory(gathering(grade, 3, shared.PLAIN))
    memory.check_model(grade, exchanges=False)
