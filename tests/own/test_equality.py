"""Tasks 1, 2a, 2b and 3 compute the same: gradients, weights and losses, on 1, 2, 3 and 4 workers, over real gloo.

Gradients and parameters may differ by 1e-5 of the tensor's norm plus 1e-7 of the norm of all tensors together, losses
by 1e-5: sums in another order round differently.
"""

import functools
import json

import pytest
import torch

from common.paths import ROOT
from tests.own.equal_runs import CASES
from tests.own.warm import Script

CASE_SYNCS = [(case, sync) for case, syncs in CASES.items() for sync in syncs]
SOME, OTHERS = ("1", "3"), ("2", "4")  # numbers of workers: of make test, and of make bank as well
WORLD_SIZES = [pytest.param(int(size), marks=pytest.mark.medium) for size in SOME]
WORLD_SIZES += [pytest.param(int(size), marks=pytest.mark.proof) for size in OTHERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(number of workers) -> where equal_runs.py keeps its runs, once those with so many are made."""
    kept = tmp_path_factory.mktemp("equal")

    @functools.cache
    def make(sizes):
        log = kept / f"log{sizes[0]}"
        code = Script(ROOT / "tests/own/equal_runs.py", (kept, *sizes), log).wait(timeout=360)
        assert code == 0, log.read_text()

    def made(size):
        make(SOME)  # the others are compared with one worker
        if str(size) in OTHERS:
            make(OTHERS)
        return kept

    return made


@pytest.fixture(scope="module")
def steps(folder):
    """steps(case, sync, world size) -> what every rank kept of five SGD steps."""

    @functools.cache
    def read(case, sync, size):
        return [torch.load(folder(size) / f"{case}_{sync}_{size}_{rank}.pt") for rank in range(size)]

    return read


def mean_losses(folder, run, size):
    """The loss of every iteration of a script's run, as the mean over its workers."""
    records = [json.loads((folder(size) / f"{run}_{size}" / f"rank{rank}.json").read_text()) for rank in range(size)]
    return [sum(step) / size for step in zip(*([i["loss"] for i in r["iterations"]] for r in records), strict=True)]


def furthest(got, expected):
    """The largest difference in units of what equality allows; at most 1 means equal, and the parameter's name."""
    assert got.keys() == expected.keys()
    whole = torch.sqrt(sum(tensor.double().square().sum() for tensor in expected.values()))
    excess = {
        name: float((got[name] - tensor).abs().max() / (1e-5 * tensor.norm() + 1e-7 * whole))
        for name, tensor in expected.items()
    }
    return max((value, name) for name, value in excess.items())


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("case, sync", CASE_SYNCS)
def test_gradients_right_after_the_sync_are_those_of_the_whole_batch(steps, case, sync, size):
    expected = steps(case, "1", 1)[0]["gradients"]

    for rank in steps(case, sync, size):
        assert furthest(rank["gradients"], expected) <= (1, "~")


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("case, sync", CASE_SYNCS)
def test_parameters_after_five_sgd_steps_are_those_of_one_worker(steps, case, sync, size):
    expected = steps(case, "1", 1)[0]["parameters"]

    for rank in steps(case, sync, size):
        assert furthest(rank["parameters"], expected) <= (1, "~")


@pytest.mark.medium
def test_a_frozen_parameter_has_no_gradient_and_does_not_move(steps):
    name = "bert.embeddings.word_embeddings.weight"
    three, one = steps("frozen_bert", "2a", 3), steps("frozen_bert", "1", 1)[0]

    assert all(name not in rank["gradients"] for rank in three)
    assert all(torch.equal(rank["parameters"][name], one["parameters"][name]) for rank in three)


@pytest.mark.medium
def test_a_tied_weight_is_one_parameter_with_one_gradient(steps):
    for rank in steps("tied_gpt2", "2b_gpt2", 3):
        assert "transformer.wte.weight" in rank["gradients"]
        assert "lm_head.weight" not in rank["gradients"]


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("sync", ["2a", "2b", "3"])
def test_the_scripts_losses_are_those_of_one_worker(folder, sync, size):
    losses = mean_losses(folder, sync, size)

    assert len(losses) == 5
    assert losses == pytest.approx(mean_losses(folder, "1", 1), abs=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("sync", ["2a", "2b", "3"])
def test_the_padded_end_of_an_epoch_is_that_of_one_worker_given_the_padded_order(folder, sync):
    losses = mean_losses(folder, f"end_{sync}", 4)

    assert len(losses) == 2 * 2  # 24 examples an epoch, 12 in a step
    assert losses == pytest.approx(mean_losses(folder, "end_1", 1), abs=1e-5)
