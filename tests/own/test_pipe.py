"""Our own tests of the Pipe: it computes what the module computes, forward and backward, and overlaps."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.pipe import Pipe
from tests.own.pipeline_stages import Meet, Note, labelled, mlp, no_worker_is_left

__all__ = ["no_worker_is_left"]  # a fixture for every test here


@pytest.mark.parametrize("batch, split_size", [(8, 2), (8, 8), (7, 2), (5, 1), (3, 10), (1, 1)])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_output_and_every_gradient_are_those_of_the_plain_model(batch, split_size, stages):
    plain = nn.Sequential(*mlp())
    layers = list(copy.deepcopy(plain))
    piped = Pipe(labelled(*layers[: stages - 1], nn.Sequential(*layers[stages - 1 :])), split_size)
    x = torch.randn(batch, 6)
    x_plain, x_piped = x.clone().requires_grad_(), x.clone().requires_grad_()

    expected, got = plain(x_plain), piped(x_piped)
    expected.square().mean().backward()
    got.square().mean().backward()

    assert len(piped.partitions) == stages
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x_piped.grad, x_plain.grad, rtol=1e-5, atol=1e-7)
    for wanted, parameter in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-5, atol=1e-6)


def test_gradients_add_up_over_several_backwards_as_usual():
    plain = nn.Sequential(*mlp())
    piped = Pipe(labelled(*copy.deepcopy(plain)), 2)
    first, second = torch.randn(4, 6), torch.randn(6, 6)

    for model in (plain, piped):
        model(first).sum().backward()
        (model(second).mean() * model(first).std()).backward()

    for wanted, parameter in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-5, atol=1e-6)


def test_an_output_can_be_used_twice():
    plain = nn.Sequential(*mlp())
    piped = Pipe(labelled(*copy.deepcopy(plain)), 3)
    x = torch.randn(6, 6)

    for model in (plain, piped):
        y = model(x)
        (y.square().sum() + y[2:].exp().sum()).backward()

    for wanted, parameter in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-5, atol=1e-6)


def test_the_pipe_can_stand_in_the_middle_of_a_larger_model():
    torch.manual_seed(0)
    before, after, plain = nn.Embedding(10, 6), nn.Linear(5, 1), nn.Sequential(*mlp())
    piped = Pipe(labelled(*copy.deepcopy(plain)), 2)
    tokens = torch.randint(0, 10, (5,))
    gradients = []

    for middle in (plain, piped):
        before.zero_grad()
        after(middle(before(tokens))).sum().backward()
        gradients.append(before.weight.grad.clone())

    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_a_first_stage_of_token_ids_and_a_frozen_stage_work():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(10, 6), *mlp())
    for parameter in plain[1].parameters():
        parameter.requires_grad_(False)
    piped = Pipe(labelled(*copy.deepcopy(plain)), 2)
    tokens = torch.randint(0, 10, (5, 3))

    for model in (plain, piped):
        model(tokens).square().sum().backward()

    for wanted, parameter in zip(plain.parameters(), piped.parameters(), strict=True):
        assert (parameter.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-5, atol=1e-6)


def test_a_pipe_without_any_parameter_passes_the_gradient_through():
    piped = Pipe(labelled(nn.Tanh(), nn.Sigmoid()), 2)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(piped, x)


def test_a_stage_may_begin_with_a_layer_that_works_in_place():
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    inplace = copy.deepcopy(plain)
    inplace[1] = nn.ReLU(inplace=True)
    piped = Pipe(labelled(*inplace), 2)
    x = torch.randn(4, 3)

    for model in (plain, piped):
        model(x).sum().backward()

    torch.testing.assert_close(piped.partitions[0][0].weight.grad, plain[0].weight.grad)


def test_checkpointing_works_inside_a_stage():
    class Checkpointed(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    piped = Pipe(labelled(Checkpointed(3, 3), Checkpointed(3, 3)), 2)

    piped(torch.randn(4, 3)).sum().backward()

    assert piped.partitions[0][0].weight.grad.abs().sum() > 0


def test_without_grad_no_stage_builds_a_graph():
    note = Note()
    piped = Pipe(labelled(nn.Linear(3, 3), note), 2)

    with torch.no_grad():
        y = piped(torch.randn(4, 3))

    assert not y.requires_grad
    assert [enabled for _, enabled, _ in note.seen] == [False, False]


def test_inference_mode_works():
    piped = Pipe(labelled(nn.Linear(3, 3), nn.Linear(3, 3)), 2)

    with torch.inference_mode():
        y = piped(torch.randn(4, 3))

    assert y.shape == (4, 3)


def test_a_layer_method_called_directly_computes_the_same_with_the_usual_backward():
    plain = nn.Sequential(*mlp())
    piped = Pipe(labelled(*copy.deepcopy(plain)), 2)
    x = torch.randn(4, 6)

    plain(x).sum().backward()
    piped.forward(x).sum().backward()

    for wanted, parameter in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_micro_batch_1_in_partition_0_and_micro_batch_0_in_partition_1_are_computed_at_the_same_time(phase):
    barrier = threading.Barrier(2)
    piped = Pipe(labelled(Meet(phase, barrier, alone=0.0), Meet(phase, barrier, alone=1.0)), 1)
    x = torch.arange(2.0).unsqueeze(1).requires_grad_()

    piped(x).sum().backward()

    assert x.grad.flatten().tolist() == [1, 1]


def test_every_backward_runs_in_the_worker_of_its_partition():
    notes = [Note(), Note(), Note()]
    piped = Pipe(labelled(*notes), 1)

    piped(torch.randn(4, 2, requires_grad=True)).sum().backward()

    for j, note in enumerate(notes):
        assert note.backward_threads == [f"partition {j} (cpu:{j})"] * 4
