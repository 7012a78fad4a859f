"""T5's workers have different numbers of target tokens; the loss of a step is the mean over all of them."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from benchmark.arguments import parse
from benchmark.proof.cases import cases, reference
from benchmark.proof.judge import change, compare, limits
from benchmark.training.workload import load_workload

pytest.importorskip("tensorboard")


@pytest.fixture(scope="module")
def whole():
    """Settings with 8 examples in a step, T5, and transformers' own loss and gradient of these examples."""
    settings, _ = parse(["--model", "t5-tiny", "--length", "32", "--batch_size", "8", "--dropout", "0"])
    workload = load_workload(settings)
    model, batch = workload.build(settings), next(workload.batches(settings))
    del batch["step_lengths"]
    loss = model(**batch).loss
    loss.backward()
    return settings, workload, model, loss.item(), model.shared.weight.grad


@pytest.mark.parametrize(("workers", "accumulation"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_loss_and_gradient_are_the_same_however_the_examples_are_divided(workers, accumulation, whole):
    settings, workload, model, loss, gradient = whole
    micro_batches = workers * accumulation
    settings = replace(settings, world_size=workers, accumulation=accumulation, batch_size=8 // micro_batches)
    ranks = [workload.batches(replace(settings, rank=rank)) for rank in range(workers)]
    batches = [batch for rank in ranks for batch in islice(rank, accumulation)]
    model.zero_grad()

    mean = torch.stack([model(**batch).loss for batch in batches]).mean()
    mean.backward()

    counts = {int((batch["labels"] != -100).sum()) for batch in batches}
    assert len(counts) > 1 or micro_batches == 1
    assert mean.item() == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(model.shared.weight.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("seed", [6, 8])
def test_rounding_alone_is_no_fault_of_an_engine(seed, whole, monkeypatch):
    """With these seeds and ReLU, units of T5 are on one side of the kink in fp32 and on the other one in fp64."""
    settings = replace(whole[0], world_size=3, batch_size=2, seed=seed)
    case, before_and_after = cases(1)[-1], []
    for double in (nn.Module.double, lambda model: model):
        monkeypatch.setattr(nn.Module, "double", double)
        before_and_after.append(reference(case, settings, whole[1]).parameters[:: case.steps])
    right, rounded = before_and_after

    assert compare(change(*rounded), change(*right), right[0], limits(case, "fp32")).fault == ""
