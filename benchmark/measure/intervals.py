"""What a repeated measurement says: its median, and how far that median can be trusted."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def interval(samples: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Median, and its bootstrap 95 % interval (Efron 1979: resample with replacement, take percentiles)."""
    values = np.asarray(samples, dtype=float)
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def ratio(left: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Ratio of the medians of two measurements taken in the same rounds, and its bootstrap 95 % interval.

    Rounds are resampled as pairs: what disturbed both in one round stays together.
    """
    pairs = np.stack([np.asarray(left, dtype=float), np.asarray(right, dtype=float)], axis=1)
    rounds = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    medians = np.median(pairs[rounds], axis=1)  # (resamples, 2)
    low, high = np.percentile(medians[:, 0] / medians[:, 1], [2.5, 97.5])
    middle = np.median(pairs, axis=0)
    return float(middle[0] / middle[1]), float(low), float(high)
