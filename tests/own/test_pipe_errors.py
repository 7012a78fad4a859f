"""Our own tests of what the Pipe does with errors and wrong input."""

import gc

import pytest
import torch
from torch import nn

from common.errors import InputError
from pipeline.pipe import Pipe
from tests.own.pipeline_stages import labelled, mlp, no_worker_is_left, worker_threads
from tests.own.started_processes import wait_for

__all__ = ["no_worker_is_left"]  # a fixture for every test here


class Fail(nn.Module):
    """A layer that raises in the forward or in the backward of the micro-batch whose first value is `at`."""

    def __init__(self, phase: str, at: float) -> None:
        super().__init__()
        self.phase, self.at = phase, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = x.flatten()[0].item() == self.at
        if bad and self.phase == "forward":
            raise LookupError("the layer's own words")
        y = x * 1
        if bad and self.phase == "backward":
            y.register_hook(self._raise)
        return y

    def _raise(self, gradient: torch.Tensor) -> None:
        raise LookupError("the layer's own words")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 2])
def test_what_a_layer_raises_arrives_as_it_was_raised_and_the_pipe_still_works(phase, stage):
    layers: list[nn.Module] = [nn.Identity(), nn.Identity(), nn.Identity()]
    layers[stage] = Fail(phase, at=1)
    piped = Pipe(labelled(*layers), 1)

    with pytest.raises(LookupError, match="the layer's own words") as raised:
        piped(torch.arange(4.0).unsqueeze(1).requires_grad_()).sum().backward()

    assert raised.traceback[-1].frame.code.name == ("forward" if phase == "forward" else "_raise")
    good = torch.arange(2.0, 6).unsqueeze(1).requires_grad_()
    y = piped(good)
    y.sum().backward()
    assert torch.equal(y, good) and good.grad.sum() == 4


def test_after_errors_only_the_workers_of_the_pipe_are_left():
    piped = Pipe(labelled(nn.Identity(), Fail("forward", at=0)), 1)

    for _ in range(3):
        with pytest.raises(LookupError):
            piped(torch.zeros(3, 1))
    gc.collect()  # the tracebacks can hold the old queues

    wait_for(lambda: len(worker_threads()) == 2, "the old workers to end")


def test_a_second_backward_adds_the_same_gradients_again_with_retain_graph_and_is_refused_without():
    piped = Pipe(labelled(*mlp()), 2)
    x = torch.randn(5, 6, requires_grad=True)
    y = piped(x).sum()

    y.backward(retain_graph=True)
    once = [x.grad.clone(), *(parameter.grad.clone() for parameter in piped.parameters())]
    y.backward()

    for tensor, gradient in zip([x, *piped.parameters()], once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="one backward"):
        y.backward()


def test_a_parameter_used_twice_in_one_partition_is_fine():
    shared = nn.Linear(2, 2)

    Pipe(labelled(nn.Sequential(shared, shared), nn.Linear(2, 2)), 1)(torch.randn(2, 2)).sum().backward()

    assert shared.weight.grad is not None


SHARED = nn.Linear(2, 2)


@pytest.mark.parametrize(("module", "split_size", "words"), [
    (labelled(SHARED, SHARED), 1, r"partition 0 \(0\.weight\) and in partition 1 \(0\.weight\)"),
    (labelled(SHARED), 0, "split_size"),
    (labelled(SHARED), 2.5, "split_size"),
    (nn.Sequential(), 1, "at least one layer"),
], ids=["a shared parameter", "no example", "half an example", "no layer"])  # fmt: skip
def test_what_makes_no_pipe_is_refused(module, split_size, words):
    with pytest.raises(InputError, match=words):
        Pipe(module, split_size)


def test_an_input_that_is_no_batch_and_a_stage_that_hands_on_no_tensor_are_named():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(InputError, match="got tuple"):
        Pipe(labelled(nn.Linear(2, 2)))((torch.ones(2, 2),))
    with pytest.raises(TypeError, match="partition 0 to return one tensor, got tuple"):
        Pipe(labelled(Pair(), nn.Linear(2, 2)))(torch.ones(2, 2))
