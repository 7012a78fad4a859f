"""Graders of 1F1B: the rules of the schedule, how long it takes, and a pipeline of real ranks that keeps to it."""

import pytest

from grader.checks.beyond.one_f_one_b import orders, stages

graded = pytest.mark.graded


@graded("b.13")
def test_every_micro_batch_goes_forward_and_backward_once_and_few_are_alive(grade):
    grade.imports_only_allowed(orders.FILE)
    orders.check(grade, orders.few_alive)


@graded("b.13")
def test_backward_begins_as_early_as_it_can_and_no_stage_waits_though_it_has_work(grade):
    orders.check(grade, orders.warm_up, orders.alternating, orders.no_slower_than_gpipe)


@graded("b.13")
def test_a_pipeline_in_this_order_computes_what_one_worker_computes(grade):
    for setting in stages.SETTINGS:
        stages.check(grade, setting)
