"""Mean and standard deviation of repeated measurements, as all figures of the course show them."""

import statistics
from collections.abc import Sequence


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (divided by n-1); the deviation of one value is 0."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
