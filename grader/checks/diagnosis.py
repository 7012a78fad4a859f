"""Which known mistake gives exactly this result: names for wrong means, wrong steps and wrong orders.

Each question is put as a candidate: a value that a certain mistake would leave. The first that fits all that is wrong
is named; where none fits, the message says expected and got and no more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grader.checks.reference import close, means, norm
from grader.ranks.outcome import Result
from grader.wire.drawn import weight

Maybe = np.ndarray | None
WHATEVER = ", whatever world_size is"
SHOWN = 4  # numbers of a tensor in a message


def same(got: Maybe, candidate: np.ndarray, total: float = 0.0) -> bool:
    """`total` is the norm of all that was added up: a small sum of large numbers is as exact as they are."""
    return close(got, candidate, max(total, float(np.linalg.norm(np.ravel(candidate))) + 1e-6))


Unsent = Callable[[int, int], bool]  # (rank, parameter): whether its gradient was in no collective


def name_wrong_mean(
    got: Sequence[Sequence[Maybe]], inputs: Sequence[Sequence[np.ndarray]], unsent: Unsent = lambda r, k: False
) -> str:
    """The mistake that leaves `got[rank][parameter]` where the mean of `inputs[rank][parameter]` should be; "" if none.

    Only parameters that are wrong somewhere are looked at, so a mistake that spares some is still named.
    """
    with np.errstate(all="ignore"):  # what a student's gradients hold is compared and not computed with
        return _name_wrong_mean(got, inputs, unsent)


def _name_wrong_mean(got: Sequence[Sequence[Maybe]], inputs: Sequence[Sequence[np.ndarray]], unsent: Unsent) -> str:
    n = len(inputs)
    if n == 1:
        return ""  # there is nobody to take a mean with
    right = means(inputs)
    total = norm({f"{r} {k}": array for r, mine in enumerate(inputs) for k, array in enumerate(mine)})
    wrong = [k for k in range(len(right)) if not all(same(got[r][k], right[k], total) for r in range(n))]
    if not wrong:
        return ""
    if any(got[r][k] is None for r in range(n) for k in wrong):
        return (
            "param.grad is None afterwards: did you assign the result of a collective to it? Collectives work in place "
            "and return no tensor"
        )
    left = [np.asarray(got[r][k]) for r in range(n) for k in wrong]
    if any(array.dtype.kind == "f" and not np.all(np.isfinite(array)) for array in left):
        return (
            "param.grad contains inf or nan: did you divide by the rank (0 on rank 0) instead of the number of workers?"
        )
    ranks = [r for r in range(n) if any(not same(got[r][k], right[k], total) for k in wrong)]
    stacked = [np.asarray([mine[k] for mine in inputs], np.float64) for k in range(len(right))]  # (n, *shape) each
    if all(same(got[r][k], inputs[r][k], total) and unsent(r, k) for r in ranks for k in wrong):
        text = "every worker still has its own gradient, which was never passed to a collective"
        asked = ": do you send param.grad, and do you also send the last bucket?"
        where = _where(ranks, wrong, n, inputs[0]) or asked
        return text + where.replace("end the loop early?", "end the loop early, or is the last bucket never sent?")
    for candidate, words in _candidates(n):
        if all(same(got[r][k], candidate(stacked[k], r), total) for r in ranks for k in wrong):
            return words + _where(ranks, wrong, n, inputs[0])
    if name := _swapped(got, right, wrong, ranks):
        return name
    ratio = _ratio([(got[r][k], right[k]) for r in ranks for k in wrong], total)
    if ratio is not None:
        return f"every gradient is {ratio:.3f} times the mean on {n} workers" + _where(ranks, wrong, n, inputs[0])
    shared = all(same(got[r][k], np.asarray(got[ranks[0]][k])) for r in ranks for k in wrong)
    return "the workers have different results" if not shared else ""


def _candidates(n: int) -> list[tuple[Callable[[np.ndarray, int], np.ndarray], str]]:
    """(value from the inputs (n, *shape) and the rank, its name)."""
    weights = sum(map(weight, range(n)))
    return [
        (lambda x, r: x.sum(0), _times(n)),
        (lambda x, r: x[r], "every worker still has its own gradient: the result did not get into param.grad"),
        (lambda x, r: x[r] / n, "param.grad is the worker's own gradient divided by world_size: nothing was summed"),
        (lambda x, r: x[0], "param.grad is rank 0's gradient: it was distributed without averaging"),
        (lambda x, r: x[-1], "param.grad is the last rank's gradient: do all entries of the list share one tensor?"),
        (lambda x, r: x[1:].sum(0) / n, "rank 0's own gradient is missing from the sum"),
        (lambda x, r: x[1:].mean(0), "rank 0's own gradient is missing from the mean"),
        (lambda x, r: x[:-1].sum(0) / n, "the last rank's gradient is missing from the sum"),
        (lambda x, r: (x.sum(0) + x[0]) / n, "rank 0's gradient is counted twice"),
        (lambda x, r: x.mean(0) / n, "the sum was divided by world_size twice"),
        (lambda x, r: x.mean(0) * 0, "every gradient is zero: was it zeroed before or after averaging?"),
        (lambda x, r: np.full(x.shape[1:], x.mean()), _all_equal("mean") + " (use dim=0)"),
        (lambda x, r: np.full(x.shape[1:], x.sum() / n), _all_equal("sum")),
        (lambda x, r: x.sum(0) / 2, "the sum is divided by 2" + (" (world_size - 1?)" if n == 3 else WHATEVER)),
        (lambda x, r: x.sum(0) / 4, "the sum is divided by 4" + WHATEVER),
        (lambda x, r: x.sum(0) / (n - 1), "the sum is divided by world_size - 1"),
        (lambda x, r: x.sum(0) // n, "the division rounds down: // is for whole numbers"),
        (lambda x, r: x.max(0), "param.grad is the largest of the workers' gradients and not their mean"),
        (lambda x, r: x.prod(0), "param.grad is the product of the workers' gradients and not their mean"),
        (lambda x, r: np.full(x.shape[1:], weight(r)), "param.grad contains the parameter itself (param.data)"),
        (lambda x, r: np.full(x.shape[1:], weights / n), "the parameters (param.data) were averaged, not gradients"),
        (lambda x, r: np.full(x.shape[1:], weights), "the parameters (param.data) were summed, not gradients"),
        (lambda x, r: x[: r + 1].sum(0), "the sum includes only some of the workers"),
    ]  # fmt: skip


def _all_equal(what: str) -> str:
    return f"all elements are equal: the {what} was also taken over the elements"


def _times(n: int) -> str:
    text = f"every gradient is {n:.3f} times the mean on {n} workers: did you divide by world_size?"
    return text + " (Here, world_size - 1 is 1.)" * (n == 2)


def _where(ranks: list[int], wrong: list[int], n: int, parameters: Sequence[np.ndarray]) -> str:
    """Which parameters and ranks share the mistake, if not all do."""
    text = ""
    count = len(parameters)
    if len(wrong) < count:
        small = [k for k in range(count) if parameters[k].ndim < 2]
        if wrong == small:
            text += "; only tensors with fewer than two dimensions (biases, LayerNorm): they were left out"
        elif len(wrong) == count - wrong[0]:
            text += f"; from parameter {wrong[0]} on: does something end the loop early?"
        elif wrong == list(range(len(wrong))):
            text += "; all but the last: do you wait only for the last handle, or is a line outside the loop?"
        else:
            text += f"; only {len(wrong)} of {count} parameters"
    if len(ranks) < n:
        text += "; only on ranks other than 0" if 0 not in ranks and len(ranks) == n - 1 else f"; only on ranks {ranks}"
    return text


def _swapped(got: Sequence[Sequence[Maybe]], means: list[np.ndarray], wrong: list[int], ranks: list[int]) -> str:
    """Whether each wrong one holds the mean of another parameter."""
    for r in ranks:
        if not all(any(same(got[r][k], means[j]) for j in range(len(means)) if j != k) for k in wrong):
            return ""
    return "parameters have the gradient of another parameter: are they in the same order on every worker?"


def name_scaled(pairs: Sequence[tuple[Maybe, np.ndarray]]) -> str:
    """The mistake that leaves every gradient (got, expected) times one factor; "" if there is no such factor."""
    factor = _ratio(list(pairs))
    if factor is None or not factor:
        return ""
    if factor < 0:
        return f"every gradient is {factor:.3f} times the batch's: the sign is reversed, so the step increases the loss"
    whole = abs(factor - round(factor)) < 1e-3
    cause = "does backward run more than once, or is the loss multiplied?" if whole else "is the loss multiplied?"
    cause = cause if factor > 1 else "is the loss divided? It is a mean already"
    return f"every gradient is {factor:.3f} times the batch's: {cause}"


def _ratio(pairs: list[tuple[Any, np.ndarray]], total: float = 0.0) -> float | None:
    """The one factor between all pairs, if there is one."""
    if any(np.shape(got) != mean.shape or not np.any(mean) for got, mean in pairs):
        return None
    # From the largest one: that of a mean near zero is mostly rounding.
    got, mean = max(pairs, key=lambda pair: float(np.linalg.norm(pair[1])))
    factor = float(np.vdot(mean, got) / np.vdot(mean, mean))
    return factor if np.isfinite(factor) and all(same(got, mean * factor, total) for got, mean in pairs) else None


def forgotten_waits(result: Result) -> str:
    """Handles of async_op=True that nobody waited for, as words; "" if there are none."""
    for rank in result.ranks:
        lost = [call for call in rank.calls if call.asynchronous and not call.waited]
        if lost:
            first = f"{lost[0].name} #{lost[0].number} ({lost[0].where})"
            return f"rank {rank.rank} never calls wait() on {len(lost)} asynchronous handles, the first is {first}"
    return ""


def unsent(result: Result, inputs: Sequence[Sequence[np.ndarray]]) -> Unsent:
    """Whether a gradient of `inputs[rank][parameter]` is in no payload of its rank, as it was or divided by the number
    of ranks; never if the run kept no payloads."""
    n = len(inputs)
    sent: dict[int, np.ndarray] = {}
    for rank in result.ranks:
        payloads = [call.sent_arrays().ravel() for call in rank.calls if call.payload and call.name != "broadcast"]
        sent[rank.rank] = np.concatenate(payloads).astype(np.float64) if payloads else np.empty(0)

    def is_unsent(rank: int, k: int) -> bool:
        calls = [call for call in result.ranks[rank].calls if call.sent]
        if any(call.payload is None for call in calls):
            return False
        flat = np.ravel(inputs[rank][k]).astype(np.float64)
        largest = flat[np.argsort(-np.abs(flat))[:4]]  # one number alone is near some other tensor's with some draws
        return not any(
            all(np.isclose(sent[rank], value / divisor, rtol=1e-5, atol=0).any() for value in largest)
            for divisor in (1, n)
        )

    return is_unsent


def parameter_words(name: str, got: Maybe, expected: np.ndarray) -> str:
    """`parameter 3 (4, 3) at [0, 1] [2, 2]: expected 0.12 0.5, got 0.36 1.5 (off by 1 at most)`

    Shows the elements that differ; without places if all do.
    """
    expected = np.asarray(expected)
    if got is None:
        return (
            f"{name} {expected.shape}: expected {_numbers(np.ravel(expected)[:SHOWN], expected.size)}, got no gradient"
        )
    if np.shape(got) != expected.shape:
        return f"{name}: expected the shape {expected.shape}, got {np.shape(got)}"
    mine, right = np.ravel(np.asarray(got, np.float64)), np.ravel(np.asarray(expected, np.float64))
    with np.errstate(all="ignore"):
        off = np.nan_to_num(np.abs(mine - right), nan=np.inf)
    worst = float(off.max(initial=0.0))
    wrong = np.flatnonzero(off > 0.01 * worst) if np.isfinite(worst) else np.flatnonzero(~np.isfinite(off))
    places, at = wrong[:SHOWN], ""
    if len(wrong) < len(off):
        at = " at " + " ".join(str([int(i) for i in np.unravel_index(place, expected.shape)]) for place in places)
    numbers = [_numbers(values[places], len(wrong)) for values in (right, mine)]
    return f"{name} {expected.shape}{at}: expected {numbers[0]}, got {numbers[1]} (off by {worst:.2g} at most)"


def _numbers(values: np.ndarray, count: int) -> str:
    return "[" + " ".join(f"{x:.5g}" for x in values) + (" ...]" if count > len(values) else "]")
