"""The parameters of a run as the judge computes them: what a rank reports of them has no say."""

import numpy as np
import pytest

from grader.arithmetic import Tolerance, close
from grader.ranks.calls import Event
from grader.ranks.outcome import RankResult, Result
from grader.wire import drawn
from tests.training import reference
from tests.training.loop_shared import RATE, Training

WEIGHTS = drawn.classifier(3, 4)
IDS, LABELS = drawn.examples(3, 4)
FIRST = reference.classifier(WEIGHTS, IDS[:2], LABELS[:2])[1]


def rank_of(number, rows, gradients, rate=RATE, parameters=None):
    """One step on some examples with these gradients, and what the rank says of its parameters."""
    events = [
        ("forward", {"first": IDS[rows, 0].tolist(), "training": True, "grad": True, "noise": 0.5}),
        ("step", {"gradients": gradients, "parameters": parameters or {}, "rate": rate, "remembered": 0}),
        ("stepped", {}),
    ]
    return RankResult(number, "returned", events=[Event(name, "", "", data) for name, data in events])


def training(*ranks, limit=0.0):
    count = len(ranks)
    result = Result(list(ranks), None, [], 1.0)
    return Training(None, result, WEIGHTS, [IDS] * count, [LABELS] * count, 4, 2, RATE, limit)


def first(gradients, **said):
    """The rank that steps with these gradients on the first two examples."""
    return rank_of(0, slice(0, 2), gradients, **said)


def moved_by(run):
    after = run.parameters(0, 1)
    return {name: (WEIGHTS[name] - after[name]) / RATE for name in FIRST}


@pytest.mark.parametrize("parameters", [{}, {"offset": np.full(5, 1e6)}, {name: 0 * WEIGHTS[name] for name in WEIGHTS}])
def test_reported_parameters_and_wrong_gradients_move_nothing(parameters):
    zeros = {name: np.zeros_like(array) for name, array in FIRST.items()}

    moved = moved_by(training(first(zeros, parameters=parameters)))

    assert all(np.allclose(moved[name], FIRST[name], atol=1e-3) for name in FIRST)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_gradient_times_a_factor_moves_by_that_factor(factor):
    moved = moved_by(training(first({name: factor * array for name, array in FIRST.items()})))

    assert all(np.allclose(moved[name], factor * FIRST[name], atol=1e-3) for name in FIRST)


@pytest.mark.parametrize(("factor", "rate"), [(1e-3, RATE), (1.0, 1e-9), (1.0, float("nan")), (1.0, "0.0025")])
def test_nobody_trains_by_standing_still(factor, rate):
    moved = moved_by(training(first({name: factor * array for name, array in FIRST.items()}, rate=rate)))

    assert all(np.allclose(moved[name], FIRST[name], atol=1e-3) for name in FIRST)


def test_a_clipped_gradient_moves_by_what_is_left_of_it():
    clipped = reference.clipped(FIRST, 0.05)

    moved = moved_by(training(first(clipped), limit=0.05))

    assert all(np.allclose(moved[name], clipped[name], atol=1e-4) for name in FIRST)


def test_nothing_is_close_to_numbers_whose_norm_is_infinite():
    assert not close(np.zeros(2), np.ones(2), Tolerance(float("inf")))
    assert not close(np.zeros(2), np.full(2, 1e200), Tolerance(1.0))


def test_ranks_that_do_not_average_move_by_their_own_clipped_gradients_however_small():
    """A limit far below the norm: the factor of clipping is no mistake of the rank's, with the mean or without it."""
    limit, ranks = 0.01 * reference.norm(FIRST), []
    for number, rows in enumerate((slice(0, 2), slice(2, 4))):
        own = reference.classifier(WEIGHTS, IDS[rows], LABELS[rows])[1]
        ranks.append(rank_of(number, rows, reference.clipped(own, limit)))

    moved = moved_by(training(*ranks, limit=limit))

    right = reference.clipped(FIRST, limit)
    assert all(np.allclose(moved[name], right[name], atol=1e-3 * limit) for name in FIRST)
