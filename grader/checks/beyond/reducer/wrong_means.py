"""Names for wrong means, for the judges of the reducer, which grader/compare.py does not serve yet."""

from collections.abc import Callable, Sequence

import numpy as np

from grader.arithmetic import Tolerance, matches
from grader.call_checks import Payloads
from grader.checks.reference import means, norm
from grader.compare import Expected, explain, with_inputs
from grader.ranks.outcome import Result
from tests.gradients import test_averaging as averaging

Maybe = np.ndarray | None
Unsent = Callable[[int, int], bool]  # (rank, parameter): whether its gradient was in no collective


def name_wrong_mean(got: Sequence[Sequence[Maybe]], inputs: Sequence[Sequence[np.ndarray]], unsent: Unsent) -> str:
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


def unsent(result: Result, inputs: Sequence[Sequence[np.ndarray]]) -> Unsent:
    """Whether a gradient of `inputs[rank][parameter]` is in no payload of its rank; never if the run kept none."""
    if any(call.sent and call.payload is None for rank in result.ranks for call in rank.calls):
        return lambda rank, k: False
    payloads = Payloads(result)
    return lambda rank, k: not payloads.include(rank, inputs[rank][k])
