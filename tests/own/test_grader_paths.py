"""The parameters of a run as the judge computes them: what a rank reports of them has no say."""

import numpy as np
import pytest

from grader.ranks.calls import Event
from grader.ranks.outcome import RankResult, Result
from tests.training import reference, small_models
from tests.training.loop_shared import RATE, Training

WEIGHTS = small_models.classifier(3, 4)
IDS, LABELS = small_models.examples(3, 4)
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


def moved_by(run):
    after = run.parameters(0, 1)
    return {name: (WEIGHTS[name] - after[name]) / RATE for name in FIRST}


@pytest.mark.parametrize(("factor", "reported", "moved"), [
    (0.0, {}, 1.0),  # a wrong gradient moves nothing, and a report of parameters neither
    (0.0, {"parameters": {"offset": np.full(5, 1e6)}}, 1.0),
    (0.0, {"parameters": {name: 0 * WEIGHTS[name] for name in WEIGHTS}}, 1.0),
    (0.5, {}, 0.5),
    (2.0, {}, 2.0),
    (1e-3, {}, 1.0),  # nobody trains by standing still
    (1.0, {"rate": 1e-9}, 1.0),
    (1.0, {"rate": float("nan")}, 1.0),
    (1.0, {"rate": "0.0025"}, 1.0),
], ids=str)  # fmt: skip
def test_a_step_moves_by_a_gradient_of_the_judge_or_its_multiple_whatever_is_reported(factor, reported, moved):
    gradients = {name: factor * array for name, array in FIRST.items()}

    got = moved_by(training(rank_of(0, slice(0, 2), gradients, **reported)))

    assert all(np.allclose(got[name], moved * FIRST[name], atol=1e-3) for name in FIRST)


def test_ranks_that_do_not_average_move_by_their_own_clipped_gradients_however_small():
    """A limit far below the norm: the factor of clipping is no mistake of the rank's, with the mean or without it."""
    limit, ranks = 0.01 * reference.norm(FIRST), []
    for number, rows in enumerate((slice(0, 2), slice(2, 4))):
        own = reference.classifier(WEIGHTS, IDS[rows], LABELS[rows])[1]
        ranks.append(rank_of(number, rows, reference.clipped(own, limit)))

    moved = moved_by(training(*ranks, limit=limit))

    right = reference.clipped(FIRST, limit)
    assert all(np.allclose(moved[name], right[name], atol=1e-3 * limit) for name in FIRST)
