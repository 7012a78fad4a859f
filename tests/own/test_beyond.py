"""The solved bonus lessons on real gloo: ring and reducer average every kind of gradient, and train as one worker."""

import functools

import pytest
import torch

from common.paths import ROOT
from tests.own.warm import Script

pytestmark = pytest.mark.medium

SIZES = pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.proof) for size in (2, 4))])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """kept(scene, world size) -> what each rank kept of a scene; beyond_runs.py runs once for each size."""
    folder = tmp_path_factory.mktemp("beyond")

    @functools.cache
    def run(size):
        log = folder / f"log{size}"
        code = Script(ROOT / "tests/own/beyond_runs.py", (folder, size), log).wait(timeout=360)
        assert code == 0, log.read_text()

    def read(scene, size):
        run(size)
        return [torch.load(folder / f"{scene}_{size}_{rank}.pt", weights_only=False) for rank in range(size)]

    return read


# --- the ring ---


@SIZES
@pytest.mark.parametrize("shape", ["number", "matrix", "transposed"])
def test_the_ring_takes_any_shape_and_strides(kept, size, shape):
    for rank in kept("ring_shapes", size):
        ours, theirs = rank[shape]
        assert torch.equal(ours, theirs)


@SIZES
def test_the_ring_averages_the_gradients_of_every_dtype_and_leaves_missing_ones_alone(kept, size):
    for rank in kept("ring_means", size):
        for name, (got, expected) in rank.items():
            assert (got is None) == (expected is None) == name.startswith(("frozen", "unused"))
            if got is not None:
                torch.testing.assert_close(got, expected)


# --- the reducer ---


@SIZES
@pytest.mark.parametrize("step", [0, 1, 2], ids=["first step", "two micro-batches", "third step"])
def test_gradients_are_the_mean_over_all_ranks_for_tied_frozen_unused_and_double_parameters(kept, size, step):
    for rank in kept("odd_steps", size):
        for name, expected in rank["plain"][step].items():
            got = rank["ours"][step][name]
            if name.startswith("frozen"):
                assert got is None
            else:
                zeros = torch.zeros_like(got)
                torch.testing.assert_close(got, zeros if expected is None else expected, msg=lambda m, n=name: n + m)


@SIZES
def test_parameters_stay_the_same_on_every_rank_and_equal_one_worker_s(kept, size):
    everyone = kept("odd_steps", size)

    for rank in everyone:
        for name, parameter in rank["parameters"]["ours"].items():
            assert torch.equal(parameter, everyone[0]["parameters"]["ours"][name])
            torch.testing.assert_close(parameter, rank["parameters"]["plain"][name])


@SIZES
def test_a_second_backward_before_finish_is_refused(kept, size):
    for said in kept("second_backward", size):
        assert "a second backward before finish(); use no_sync()" in said


@SIZES
def test_a_kept_gradient_is_a_view_of_a_bucket_and_changes_in_the_next_step(kept, size):
    for rank in kept("kept_gradients", size):
        for name, (at_first, later, gradient) in rank.items():
            assert torch.equal(later, gradient), name
            assert not torch.equal(later, at_first), name


# --- both ---


@SIZES
@pytest.mark.parametrize("strategy", ["ring", "overlap"])
def test_steps_of_gpt2_agree_with_one_worker(kept, size, strategy):
    everyone = kept("trained", size)
    losses, parameters = everyone[0]["single"]

    mean = [sum(step) / size for step in zip(*(rank[strategy][0] for rank in everyone), strict=True)]
    assert mean == pytest.approx(losses, abs=5e-6)
    for rank in everyone:
        for name, parameter in rank[strategy][1].items():
            assert float((parameter - parameters[name]).abs().max()) <= 1e-5, name


@SIZES
@pytest.mark.parametrize("strategy", ["ring", "overlap"])
def test_after_them_every_rank_holds_the_same_bits(kept, size, strategy):
    everyone = [rank[strategy][1] for rank in kept("trained", size)]

    for parameters in everyone:
        assert all(torch.equal(parameter, everyone[0][name]) for name, parameter in parameters.items())
