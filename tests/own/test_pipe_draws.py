"""Our own tests of random numbers in a pipeline."""

import torch
from torch import nn

from pipeline.pipe import Pipe
from tests.own.pipeline_stages import labelled, no_worker_is_left

__all__ = ["no_worker_is_left"]  # a fixture for every test here


def test_the_same_seed_gives_the_same_masks_whichever_worker_is_faster():
    piped = Pipe(labelled(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(3))), 2)
    x = torch.randn(16, 64)
    outputs = []

    for _ in range(8):
        torch.manual_seed(5)
        outputs.append(piped(x))

    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert not torch.equal(outputs[0], piped(x))


def test_micro_batches_and_partitions_have_masks_of_their_own():
    piped = Pipe(labelled(nn.Dropout(0.5), nn.Dropout(0.5)), 1)

    y = piped(torch.ones(4, 1000))

    assert len({tuple(row.tolist()) for row in y}) == 4
    assert 0.2 < (y != 0).float().mean() < 0.3


def test_the_backward_uses_the_masks_of_its_forward():
    piped = Pipe(labelled(nn.Dropout(0.5), nn.Dropout(0.5)), 2)
    x = torch.ones(6, 100, requires_grad=True)

    y = piped(x)
    y.sum().backward()

    assert torch.equal(x.grad, y.detach())


def test_without_dropout_nothing_is_drawn():
    piped = Pipe(labelled(nn.Dropout(0.5), nn.Linear(3, 3)).eval(), 2)
    x = torch.ones(4, 3)
    state = torch.get_rng_state()

    y = piped(x)

    assert torch.equal(y, piped.partitions[1](x))
    assert torch.equal(torch.get_rng_state(), state)
