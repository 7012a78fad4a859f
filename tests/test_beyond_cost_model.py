"""Graders of the cost model: the time of a message pattern, and of a step with overlap."""

import pytest

from grader.checks.beyond import cost_model

graded = pytest.mark.graded


@graded("b.15", points=1)
def test_a_ring_takes_its_messages_one_after_another(grade):
    cost_model.check_ring(grade)


@graded("b.15", points=1)
def test_gather_and_scatter_pass_through_the_link_of_rank_0(grade):
    cost_model.check_star(grade)


@graded("b.16", points=1)
def test_a_bucket_waits_until_it_is_ready_and_the_one_before_has_arrived(grade):
    cost_model.check_exposed(grade)


@graded("b.16", points=1)
def test_a_step_takes_what_it_computes_and_what_is_not_hidden(grade):
    cost_model.check_parts(grade)
