"""Graders of the sharded model: shards that are gathered and freed, gathering ahead, gradients that leave at once."""

import pytest

from grader.checks.beyond.sharded_model import sharded_model_events, sharded_model_memory
from grader.checks.beyond.sharded_model import sharded_model_settings as settings
from grader.checks.beyond.sharded_model.sharded_block import CASES, Gathered
from grader.checks.beyond.sharded_model.sharded_model import ModelRun

graded = pytest.mark.graded
FILE = "beyond/sharded_model.py"


@graded("b.8")
def test_a_rank_keeps_its_shard_alone_and_frees_the_rest(grade):
    for world_size in (3, 2, 4, 1):
        Gathered(grade, world_size).check_shards()


@graded("b.8")
def test_a_gather_brings_the_shards_of_all_ranks_without_waiting(grade):
    for world_size, late, cases in ((3, 0, CASES), (2, None, CASES[:4]), (4, None, CASES[:4]), (1, None, CASES[:4])):
        Gathered(grade, world_size, cases, late).check()


@graded("b.8", absence=True)
def test_the_sharded_model_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(FILE, "beyond/flat_parameters.py")


@graded("b.9")
def test_every_block_computes_with_the_whole_parameters(grade):
    for world_size, setting in settings.TRAINED:
        run = ModelRun(grade, world_size, settings.gathers_only(setting))
        run.check_losses()
        run.check_local_gradients()


@graded("b.9")
def test_the_next_block_is_gathered_while_this_one_computes_and_nothing_waits(grade):
    for setting in (settings.PLAIN, settings.LATE):
        run = ModelRun(grade, 3, settings.gathers_only(setting))
        sharded_model_events.check_gathers(run)
        sharded_model_events.check_nothing_waits(run)
        sharded_model_events.check_bytes(run)


@graded("b.9")
def test_without_gradients_every_block_is_freed(grade):
    run = ModelRun(grade, 2, settings.gathers_only(settings.ODD))
    run.check_held()
    run.check_freed(evaluation=True)
    run.check_losses()
    sharded_model_events.check_gathers(run)


@graded("b.9")
def test_at_most_two_blocks_are_in_memory(grade):
    run = ModelRun(grade, sharded_model_memory.RANKS, settings.gathers_only(settings.MEMORY))
    run.check_held()
    sharded_model_memory.check_shards(run)
    sharded_model_memory.check_blocks(run)
    sharded_model_events.check_bytes(run)  # nothing is dropped for a moment, and gathered again


@graded("b.10")
def test_every_shard_gets_the_mean_gradient_and_steps_as_the_whole_model_does(grade):
    for world_size, setting in (*settings.TRAINED, (3, settings.UNUSED)):
        run = ModelRun(grade, world_size, setting)
        run.check_gradients()
        sharded_model_events.check_sums(run)
        run.check_updates()
        run.check_losses()


@graded("b.10")
def test_a_block_s_gradients_leave_as_soon_as_they_are_complete_and_no_hook_waits(grade):
    for world_size, setting in ((3, settings.PLAIN), (2, settings.ODD), (3, settings.UNUSED), (3, settings.LATE)):
        run = ModelRun(grade, world_size, setting)
        sharded_model_events.check_sends(run)
        sharded_model_events.check_nothing_waits(run)
        sharded_model_events.check_bytes(run)


@graded("b.10")
def test_between_steps_a_rank_has_only_its_shards_in_memory(grade):
    run = ModelRun(grade, sharded_model_memory.RANKS, settings.MEMORY)
    run.check_held()
    run.check_freed()
    sharded_model_memory.check_shards(run)
    sharded_model_memory.check_blocks(run)
    sharded_model_events.check_bytes(run)
