"""Names for wrong means and wrong factors, for the judges that grader/compare.py does not serve yet."""

from collections.abc import Callable, Sequence

import numpy as np

from grader.arithmetic import Tolerance, common_factor, matches
from grader.arithmetic import difference as parameter_words
from grader.call_checks import Payloads
from grader.checks.reference import close, means, norm
from grader.compare import Expected, explain, forgotten_waits, with_inputs
from grader.ranks.outcome import Result
from tests.gradients import test_averaging as averaging

__all__ = ["forgotten_waits", "name_scaled", "name_wrong_mean", "parameter_words", "same", "unsent"]
Maybe = np.ndarray | None


def same(got: Maybe, candidate: np.ndarray, total: float = 0.0) -> bool:
    """`total` is the norm of all that was added up: a small sum of large numbers is as exact as they are."""
    return close(got, candidate, max(total, float(np.linalg.norm(np.ravel(candidate))) + 1e-6))


Unsent = Callable[[int, int], bool]  # (rank, parameter): whether its gradient was in no collective


def name_wrong_mean(
    got: Sequence[Sequence[Maybe]], inputs: Sequence[Sequence[np.ndarray]], unsent: Unsent = lambda r, k: False
) -> str:
    """The mistake that leaves `got[rank][parameter]` where the mean of `inputs[rank][parameter]` should be, or ""."""
    total = norm({f"{r} {k}": array for r, own in enumerate(inputs) for k, array in enumerate(own)})
    expected, found = {}, {}
    for rank in range(len(inputs)):
        for k, mean in enumerate(means(inputs)):
            one = averaging.OneParameter(
                np.asarray([mine[k] for mine in inputs], np.float64), rank, not unsent(rank, k)
            )
            table = with_inputs(averaging.mistakes_of(one.ranks), one)
            expected[rank, f"parameter {k}"] = Expected(mean, mistakes=table, tolerance=Tolerance(total))
            found[rank, f"parameter {k}"] = got[rank][k]
    wrong = [key for key, one in expected.items() if not matches(found[key], one.value, one.tolerance)]
    return explain(found, expected, wrong) if wrong else ""


def name_scaled(pairs: Sequence[tuple[Maybe, np.ndarray]]) -> str:
    """The mistake that leaves every gradient (got, expected) times one factor; "" if there is no such factor."""
    factor = common_factor(list(pairs))
    if factor is None or not factor:
        return ""
    if factor < 0:
        return f"every gradient is {factor:.3f} times the batch's: the sign is reversed, so the step increases the loss"
    whole = abs(factor - round(factor)) < 1e-3
    cause = "does backward run more than once, or is the loss multiplied?" if whole else "is the loss multiplied?"
    cause = cause if factor > 1 else "is the loss divided? It is a mean already"
    return f"every gradient is {factor:.3f} times the batch's: {cause}"


def unsent(result: Result, inputs: Sequence[Sequence[np.ndarray]]) -> Unsent:
    """Whether a gradient of `inputs[rank][parameter]` is in no payload of its rank; never if the run kept none."""
    if any(call.sent and call.payload is None for rank in result.ranks for call in rank.calls):
        return lambda rank, k: False
    payloads = Payloads(result)
    return lambda rank, k: not payloads.include(rank, inputs[rank][k])
