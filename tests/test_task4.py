"""Graders of task 4: what is sent, written down (4.1), and what must be sent, computed (4.2)."""

import pytest

from grader.checks import expected_traffic, traffic

graded = pytest.mark.graded


@graded("4.1", points=1)
def test_every_tensor_is_written_down_as_it_is_sent(grade):
    traffic.check_written_down(grade)


@graded("4.1", points=1)
def test_gradients_travel_in_the_precision_asked_for(grade):
    traffic.check_precision(grade)


@graded("4.1", points=1)
def test_in_full_precision_every_worker_has_the_mean(grade):
    traffic.check_mean(grade)
    grade.imports_only_allowed("task4_traffic/run_glue.py")


@graded("4.2", points=1)
def test_gradient_bytes_count_what_is_sent(grade):
    expected_traffic.check_gradient_bytes(grade)
    grade.imports_only_allowed("task4_traffic/expected.py")


@graded("4.2", points=1)
def test_the_ring_s_traffic_is_right_for_every_number_of_workers(grade):
    expected_traffic.check_all_reduce(grade)


@graded("4.2", points=1)
def test_gather_and_scatter_cost_rank_0_more(grade):
    expected_traffic.check_gather_scatter(grade)


@graded("4.2", points=1)
def test_iterations_of_an_epoch_count_padding_and_the_short_batch(grade):
    expected_traffic.check_iterations(grade)


@graded("4.2", points=1)
def test_an_epoch_sends_an_iteration_s_bytes_as_often_as_it_has_iterations(grade):
    expected_traffic.check_epoch(grade)
