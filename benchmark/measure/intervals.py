"""What a repeated measurement says: its median, and how far that median can be trusted."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap, sem, t

RESAMPLES = 2000
LEAST = 6  # samples: the smallest and the largest of fewer hold the median less often than 95 times in 100
LEAST_LAUNCHES = 3
Samples = Sequence[float] | np.ndarray
Interval = tuple[float, float | None, float | None]  # median, and the ends of its 95 % interval; None: too few samples


def interval(samples: Samples) -> Interval:
    """Median, and its bootstrap 95 % interval (Efron 1979: resample with replacement, take percentiles)."""
    values = np.asarray(samples, dtype=float)
    if len(values) < LEAST:
        return float(np.median(values)), None, None
    ends = bootstrap((values,), np.median, n_resamples=RESAMPLES, method="percentile", rng=0).confidence_interval
    return float(np.median(values)), float(ends.low), float(ends.high)


def mean_interval(samples: Samples) -> Interval:
    """Mean, and its 95 % interval by Student's t, which holds for as few as three launches of a command."""
    middle = float(np.mean(samples))
    if len(samples) < LEAST_LAUNCHES:
        return middle, None, None
    half = float(t.ppf(0.975, len(samples) - 1) * sem(samples))
    return middle, middle - half, middle + half


def ratio(left: Samples, right: Samples) -> Interval:
    """Ratio of the medians of two measurements, and its bootstrap 95 % interval.

    They were taken in the same rounds, which are resampled as pairs: what disturbed both stays together.
    """
    pairs = np.asarray(left, dtype=float), np.asarray(right, dtype=float)
    middle = float(_ratio_of_medians(*pairs))
    if min(map(len, pairs)) < LEAST:
        return middle, None, None
    result = bootstrap(pairs, _ratio_of_medians, paired=True, n_resamples=RESAMPLES, method="percentile", rng=0)
    return middle, float(result.confidence_interval.low), float(result.confidence_interval.high)


def interval_text(middle: float, low: float | None, high: float | None, *, digits: int = 3) -> str:
    """For people, such as 1.015 [0.990, 1.028]; without an interval where there are too few samples for one."""
    if low is None or high is None:
        return f"{middle:.{digits}f} [-]"
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _ratio_of_medians(left: np.ndarray, right: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.median(left, axis=axis) / np.median(right, axis=axis)
