"""The parameters of a training run, step by step, computed here: from the drawn weights and the ranks' own examples.

Nothing that a rank reports of its parameters is used, so no report can make a wrong gradient right. What a rank says of
a step only chooses among what the judge has computed: which gradient was used (the mean, the rank's own, or one with
those of earlier batches in it), times which factor, at which rate. So a mistake in one region does not hide that
another is right.
"""

import math

import numpy as np

from grader.checks import reference
from grader.checks.reference import Arrays
from grader.checks.training.traces import Step

FACTORS = (0.2, 8.0)  # of a gradient that is scaled or summed
SLOWEST = 0.4  # times the schedule's rate: who stands still does not train
FLOAT32 = 20.0  # see steps


def moved(weights: Arrays, step: Step, gradient: Arrays, first: float, number: int) -> Arrays:
    """The parameters after a step; at the schedule's rate, first / (1 + number), where the rank's is no rate."""
    rate = step.rate if isinstance(step.rate, float) else math.nan
    right = first / (1 + number)
    rate = rate if SLOWEST * right <= rate <= 2 * first else right
    return {name: weight - rate * gradient[name] if name in gradient else weight for name, weight in weights.items()}


def added(gradient: Arrays, earlier: Arrays) -> Arrays:
    """What is there where gradients were not set to zero in between."""
    return {name: array + earlier.get(name, 0.0) for name, array in gradient.items()}


def used(step: Step, candidates: list[Arrays], total: float) -> Arrays:
    """Which of these gradients the optimizer has used, times its factor; the first if it was none of them."""
    got = step.grads or {}
    for candidate in candidates:
        factor = _factor(got, candidate)
        if not FACTORS[0] <= factor <= FACTORS[1]:
            continue
        scaled = {name: factor * array for name, array in candidate.items()}
        if all(reference.close(got.get(name), array, factor * total, FLOAT32) for name, array in scaled.items()):
            return scaled
    return candidates[0]


def _factor(got: dict, right: Arrays) -> float:
    name = max(right, key=lambda name: float(np.linalg.norm(right[name])))
    mine, square = np.asarray(got.get(name, math.nan), np.float64), float(np.vdot(right[name], right[name]))
    return float(np.vdot(right[name], mine)) / square if square and mine.shape == right[name].shape else math.nan
