"""Training time and tokens per second of the epochs of a run: one definition for both figures of the course."""

import pytest

from common.epochs import mean_and_deviation, measured_epochs
from task2b_allreduce import scaling


def test_the_deviation_is_that_of_a_sample_and_one_value_has_none():
    assert mean_and_deviation([1.0, 2.0, 6.0]) == (3.0, pytest.approx(7**0.5))  # (4 + 1 + 9) / (3 - 1)
    assert mean_and_deviation([5.0]) == (5.0, 0.0)


@pytest.mark.parametrize(
    ("seconds", "steps", "epochs"),
    [
        ([9.0, 1.0, 2.0, 4.0], 1, [(1.0, 128.0), (2.0, 64.0), (4.0, 32.0)]),  # the first one warms up
        ([9.0, 1.0, 1.0, 3.0, 2.0], 2, [(4.0, 64.0)]),  # the last one is not whole
        ([1.0, 3.0, 2.0], 2, [(4.0, 64.0)]),
        ([1.0, 1.0, 2.0], 9, [(4.0, 96.0)]),
    ],
    ids=["four", "two and a half", "one and a half", "a part of one"],
)
def test_epochs_are_those_that_are_whole_without_the_first(seconds, steps, epochs):
    record = {"steps_per_epoch": steps, "iterations": [{"seconds": one} for one in seconds]}

    assert measured_epochs(record, tokens=128) == epochs


def test_a_worker_counts_the_tokens_of_its_part_of_the_batch():
    sizes = {"batch_size": 8, "model_max_length": 16}
    record = {"config": sizes, "world_size": 2, "steps_per_epoch": 1, "iterations": [{"seconds": 1.0}]}

    assert scaling.epoch_metrics(record)["tokens_per_second"] == 64.0
