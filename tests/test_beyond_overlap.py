"""Graders of the gradient reducer: buckets, the hook that sends them, finish and no_sync."""

import pytest

from grader.checks.beyond.reducer import buckets, events, reducer_settings
from grader.checks.beyond.reducer.overlap import Reduced

graded = pytest.mark.graded


@graded("b.3")
def test_buckets_are_filled_in_order_up_to_their_size(grade):
    buckets.check_buckets(grade)


@graded("b.3")
def test_all_ranks_agree_on_rank_0_s_order(grade):
    buckets.check_order(grade)


@graded("b.3", absence=True)
def test_the_reducer_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(buckets.FILE)


@graded("b.4")
def test_what_backward_sends_leaves_the_mean_in_every_gradient(grade):
    for world_size, setting in reducer_settings.SENT:
        reduced = Reduced(grade, world_size, setting)
        reduced.check_means()
        events.check_accumulation(reduced)


@graded("b.4")
def test_a_bucket_leaves_as_soon_as_it_is_complete_and_no_hook_waits(grade):
    events.check_overlap(Reduced(grade, 3, reducer_settings.PLAIN))
    events.check_nothing_waits(Reduced(grade, 3, reducer_settings.LATE))


@graded("b.4")
def test_all_ranks_send_the_same_buckets_in_the_same_order(grade):
    reduced = Reduced(grade, 3, reducer_settings.CROSSED)
    events.check_overlap(reduced)
    reduced.check_means()


@graded("b.5")
def test_after_finish_every_gradient_is_the_mean_in_every_step(grade):
    for world_size in (3, 2, 4, 1):
        reduced = Reduced(grade, world_size, reducer_settings.ODD)
        reduced.check_means()
        events.check_finish(reduced)


@graded("b.5")
def test_micro_batches_under_no_sync_send_nothing_and_add_up(grade):
    reduced = Reduced(grade, 2, reducer_settings.ACCUMULATED)
    events.check_accumulation(reduced)
    events.check_overlap(reduced)
    reduced.check_means()


@graded("b.5")
def test_from_the_second_step_on_buckets_leave_in_the_order_in_which_gradients_become_ready(grade):
    reduced = Reduced(grade, 3, reducer_settings.SECOND_STEP)
    events.check_overlap(reduced)
    reduced.check_means()
