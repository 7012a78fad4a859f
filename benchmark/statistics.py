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
