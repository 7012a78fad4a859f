"""The optimizer: a step's learning rate depends on the epochs, not on where --max_steps stops; what decays."""

from types import SimpleNamespace

import pytest
import torch

from common.errors import InputError
from common.optim import build_schedule, number_of_epochs, total_steps, weight_decay_groups

STEPS_PER_EPOCH = 10


def config(max_steps=0, epochs=3, warmup_steps=0):
    return SimpleNamespace(max_steps=max_steps, num_train_epochs=epochs, warmup_steps=warmup_steps)


def rates(config, steps):
    """The learning rate of each of the first `steps` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = build_schedule(config, optimizer, STEPS_PER_EPOCH)
    made = []
    for _ in range(steps):
        made.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return made


@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_a_run_that_is_stopped_early_has_the_learning_rates_of_the_whole_run(warmup_steps):
    whole = rates(config(warmup_steps=warmup_steps), 30)

    assert rates(config(max_steps=8, warmup_steps=warmup_steps), 8) == whole[:8]
    assert whole[29] > 0 and len(set(whole)) > 8


def test_more_steps_than_the_epochs_have_stretch_the_schedule():
    assert total_steps(config(max_steps=40), STEPS_PER_EPOCH) == 40
    assert number_of_epochs(config(max_steps=40), STEPS_PER_EPOCH) == 4
    assert min(rates(config(max_steps=40), 40)) > 0


def test_a_warm_up_as_long_as_the_schedule_is_refused():
    with pytest.raises(InputError, match="fewer than the schedule's 30 steps, got 30"):
        rates(config(max_steps=8, warmup_steps=30), 1)


def test_weights_decay_and_biases_and_layer_norm_do_not_nor_what_is_frozen():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2).requires_grad_(False)
    )

    decayed, kept = weight_decay_groups(model, 0.1)

    assert [group["weight_decay"] for group in (decayed, kept)] == [0.1, 0.0]
    assert decayed["params"] == [model[0].weight]
    assert [tuple(parameter.shape) for parameter in kept["params"]] == [(2,), (2,), (2,)]
