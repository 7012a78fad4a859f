"""Times and speeds of the epochs of a GPT-2 run, with mean and deviation, as all figures of the course show them."""

import statistics
from collections.abc import Sequence


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (divided by n-1); the deviation of one value is 0."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def measured_epochs(record: dict, tokens: int) -> list[tuple[float, float]]:
    """Return the training time (s) and the tokens per second of every whole epoch. tokens: of one iteration.

    The first epoch is a warm-up and is left out, unless it is the only one. If none is whole, all iterations count.
    """
    steps = record["steps_per_epoch"]
    seconds = [iteration["seconds"] for iteration in record["iterations"]]
    epochs = [seconds[i : i + steps] for i in range(0, len(seconds), steps)]
    whole = [epoch for epoch in epochs if len(epoch) == steps] or [seconds]
    return [(sum(epoch), len(epoch) * tokens / sum(epoch)) for epoch in whole[1:] or whole]
