"""What a repeated measurement says: its median, and how far that median can be trusted."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap

RESAMPLES = 2000
Samples = Sequence[float] | np.ndarray


def interval(samples: Samples) -> tuple[float, float, float]:
    """Median, and its bootstrap 95 % interval (Efron 1979: resample with replacement, take percentiles)."""
    values = np.asarray(samples, dtype=float)
    if len(values) == 1:
        return (float(values[0]),) * 3  # nothing to resample
    found = bootstrap((values,), np.median, n_resamples=RESAMPLES, method="percentile", rng=0).confidence_interval
    return float(np.median(values)), float(found.low), float(found.high)


def ratio(left: Samples, right: Samples) -> tuple[float, float, float]:
    """Ratio of the medians of two measurements taken in the same rounds, and its bootstrap 95 % interval.

    Rounds are resampled as pairs: what disturbed both in one round stays together.
    """
    pairs = np.asarray(left, dtype=float), np.asarray(right, dtype=float)
    middle = float(_ratio_of_medians(*pairs))
    if len(pairs[0]) == 1:
        return middle, middle, middle
    found = bootstrap(pairs, _ratio_of_medians, paired=True, n_resamples=RESAMPLES, method="percentile", rng=0)
    return middle, float(found.confidence_interval.low), float(found.confidence_interval.high)


def _ratio_of_medians(left: np.ndarray, right: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.median(left, axis=axis) / np.median(right, axis=axis)
