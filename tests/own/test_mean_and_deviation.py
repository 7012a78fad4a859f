"""Mean and standard deviation over epochs: one definition for both figures of the course."""

from types import SimpleNamespace

import pytest

from common.mean_and_deviation import mean_and_deviation
from pipeline import mode_comparison
from task2b_allreduce import scaling

EPOCHS = [9.0, 1.0, 2.0, 4.0]  # seconds; the first one warms up


def test_the_deviation_is_that_of_a_sample():
    assert mean_and_deviation([1.0, 2.0, 6.0]) == (3.0, pytest.approx(7**0.5))  # (4 + 1 + 9) / (3 - 1)


def test_one_value_has_no_deviation():
    assert mean_and_deviation([5.0]) == (5.0, 0.0)


def test_data_parallel_and_pipeline_figures_have_the_same_mean_and_deviation():
    iterations = [{"seconds": seconds} for seconds in EPOCHS]
    sizes = {"batch_size": 8, "model_max_length": 16}
    record = {"config": sizes, "world_size": 1, "steps_per_epoch": 1, "iterations": iterations}

    one = scaling.epoch_metrics(record)
    other = mode_comparison.epoch_metrics(
        SimpleNamespace(**sizes), SimpleNamespace(as_dict=lambda: record, steps_per_epoch=record["steps_per_epoch"])
    )

    for name in ("training_time", "tokens_per_second"):
        assert other[name] == {"mean": pytest.approx(one[name]), "std": pytest.approx(one[f"{name}_std"])}
    assert other["epochs"] == scaling.measured_epochs(record) == [(1.0, 128.0), (2.0, 64.0), (4.0, 32.0)]
    assert one["training_time_std"] == pytest.approx((7 / 3) ** 0.5)
