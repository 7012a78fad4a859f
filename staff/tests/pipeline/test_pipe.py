"""Our own tests of the Pipe: it computes what the module computes, forward and backward, and overlaps."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.pipe import Pipe
from staff.tests.pipeline.pipeline_stages import DEADLINE, labelled, mlp, no_worker_is_left

__all__ = ["no_worker_is_left"]  # a fixture for every test here


def must_train_alike(layers, x, losses):
    """Check that a pipe of these layers gets the gradients that the layers get in a Sequential."""
    plain = nn.Sequential(*layers)
    piped = Pipe(labelled(*copy.deepcopy(layers)), 2)
    gradients = []
    for model in (plain, piped):
        own_x = x.clone().requires_grad_(x.is_floating_point())
        for loss in losses(model, own_x):
            loss.backward()
        gradients.append([own_x.grad, *(parameter.grad for parameter in model.parameters())])
    for wanted, got in zip(*gradients, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def one_loss(model, x):
    yield model(x).square().mean()


def losses_of_several_calls(model, x):
    yield model(x[:4]).sum()
    yield model(x).mean() * model(x[:4]).std()


def loss_of_an_output_used_twice(model, x):
    y = model(x)
    yield y.square().sum() + y[2:].exp().sum()


@pytest.mark.parametrize("losses", [losses_of_several_calls, loss_of_an_output_used_twice])
def test_a_pipe_can_be_used_as_any_module(losses):
    must_train_alike(mlp(), torch.randn(6, 6), losses)


class Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


MODELS = {
    "token ids and a frozen stage": [nn.Embedding(10, 6), nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)],
    "a stage that begins with work in place": [nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)],
    "checkpoints inside a stage": [Checkpointed(3, 3), Checkpointed(3, 3)],
    "no parameter at all": [nn.Tanh(), nn.Sigmoid()],
}


@pytest.mark.parametrize("name", MODELS)
def test_unusual_stages_train_as_in_the_plain_model(name):
    x = torch.randint(0, 10, (5, 3)) if "token" in name else torch.randn(5, 3)

    must_train_alike(MODELS[name], x, one_loss)


class Note(nn.Module):
    """A layer that writes down the grad mode of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.grad_modes.append(torch.is_grad_enabled())
        return x * 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_no_stage_builds_a_graph(mode):
    note = Note()
    piped = Pipe(labelled(nn.Linear(3, 3), note), 2)

    with mode():
        y = piped(torch.randn(4, 3))

    assert not y.requires_grad
    assert note.grad_modes == [False, False]


class MeetInBackward(nn.Module):
    """Continue the backward pass only while the other partition works too, except for the micro-batch `alone`."""

    def __init__(self, barrier: threading.Barrier, alone: float) -> None:
        super().__init__()
        self.barrier, self.alone = barrier, alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        if x.item() != self.alone:
            y.register_hook(self._meet)
        return y

    def _meet(self, gradient: torch.Tensor) -> None:
        self.barrier.wait(DEADLINE)


def test_backward_of_micro_batch_1_in_partition_0_and_of_0_in_partition_1_run_at_the_same_time():
    barrier = threading.Barrier(2)
    piped = Pipe(labelled(MeetInBackward(barrier, alone=0.0), MeetInBackward(barrier, alone=1.0)), 1)
    x = torch.arange(2.0).unsqueeze(1).requires_grad_()

    piped(x).sum().backward()

    assert x.grad.flatten().tolist() == [1, 1]


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_masks_whichever_worker_is_faster():
    piped = Pipe(labelled(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(3))), 2)
    x = torch.randn(16, 64)
    outputs = []

    for _ in range(8):
        torch.manual_seed(5)
        outputs.append(piped(x))

    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert not torch.equal(outputs[0], piped(x))


def test_micro_batches_and_partitions_have_masks_of_their_own_which_backward_uses_again():
    piped = Pipe(labelled(nn.Dropout(0.5), nn.Dropout(0.5)), 1)
    x = torch.ones(4, 1000, requires_grad=True)

    y = piped(x)
    y.sum().backward()

    assert len({tuple(row.tolist()) for row in y}) == 4
    assert 0.2 < (y != 0).float().mean() < 0.3
    assert torch.equal(x.grad, y.detach())
