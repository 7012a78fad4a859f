"""Graders of the sharded optimizer: shards, when gradients travel, clipping, and the gather after a step."""

import pytest

from grader.checks.beyond.sharded_model import sharded_state
from grader.checks.beyond.sharded_optimizer import (
    sharded_clip,
    sharded_gradients,
    sharded_messages,
    sharded_settings,
    sharded_steps,
)
from grader.checks.beyond.sharded_optimizer.sharded_run import OptimizerRun

graded = pytest.mark.graded


@graded("b.6")
def test_each_rank_owns_its_shard_and_gets_the_mean_of_its_gradients(grade):
    for world_size, setting in sharded_settings.MEAN:
        run = OptimizerRun(grade, world_size, setting)
        sharded_gradients.check_shards(run)
        sharded_gradients.check_means(run)
        sharded_gradients.check_frozen(run)


@graded("b.6")
def test_micro_batches_add_up_in_float32_and_every_step_starts_afresh(grade):
    for world_size, setting in sharded_settings.ADDED_UP:
        run = OptimizerRun(grade, world_size, setting)
        sharded_gradients.check_shards(run)
        sharded_gradients.check_means(run)


@graded("b.6")
def test_gradients_cost_no_more_than_a_reduce_scatter_and_leave_no_memory_behind(grade):
    for world_size, setting in sharded_settings.COUNTED:
        run = OptimizerRun(grade, world_size, setting)
        sharded_messages.check_gradient_bytes(run)
        sharded_gradients.check_given_up(run)
    sharded_state.check_messages(grade)


@graded("b.6")
def test_zero_2_sends_a_bucket_as_soon_as_it_is_complete_and_zero_1_in_finish(grade):
    for world_size, setting in sharded_settings.SENT:
        run = OptimizerRun(grade, world_size, setting)
        sharded_messages.check_sent(run)
        sharded_messages.check_nothing_waits(run)


@graded("b.7")
def test_clip_takes_the_norm_of_all_shards_and_scales_by_at_most_1(grade):
    sharded_clip.check_clip(grade)


@graded("b.7")
def test_after_each_step_all_ranks_have_the_parameters_of_one_process(grade):
    for world_size, setting in sharded_settings.TRAINED:
        sharded_steps.check_steps(grade, world_size, setting)
    sharded_steps.check_gather(grade)
    sharded_state.check_divided(grade)


@graded("b.7", absence=True)
def test_the_sharded_optimizer_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(sharded_gradients.FILE)
