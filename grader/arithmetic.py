"""Arithmetic of comparisons: whether arrays agree, whether one is a multiple of another, and where they differ."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

SHOWN = 4  # numbers of a tensor in a message


class Tolerance(NamedTuple):
    """How far a number may be off: slack * (1e-5 * norm(tensor) + 1e-7 * total), or `limit` where it is given.

    total: the norm of all that was added up, where that is larger than the tensor; limit: a number, or one per element.
    """

    total: float = 0.0
    slack: float = 1.0
    limit: np.ndarray | float | None = None


FLOAT32, EXACT = Tolerance(), Tolerance(limit=0.0)  # as close as sums of float32 are, and equal


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Return the norm of all arrays together, without their infs and nans."""
    numbers = flat(arrays)
    return float(np.linalg.norm(numbers[np.isfinite(numbers)]))


def close(got: ArrayLike | None, expected: ArrayLike, tolerance: Tolerance = FLOAT32) -> bool:
    """Return whether every element is as expected, inf and nan too. Another shape and None are never close."""
    if got is None or isinstance(got, str) or np.shape(got) != np.shape(expected):
        return False
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return False
    with np.errstate(over="ignore"):  # the limit may be infinite; then nothing is close
        of_norm = tolerance.slack * (1e-5 * np.linalg.norm(expected[finite]) + 1e-7 * tolerance.total)
    limits = np.broadcast_to(of_norm if tolerance.limit is None else tolerance.limit, finite.shape)[finite]
    return bool(np.all(np.isfinite(limits)) and np.all(np.abs(got[finite] - expected[finite]) <= limits))


def matches(got: Any, value: Any, tolerance: Tolerance = FLOAT32) -> bool:
    """Return whether `got` is the value that a mistake leaves: None, or an array."""
    if got is None or value is None or isinstance(got, str):
        return got is None and value is None
    own = norm([value]) + 1e-6
    if close(got, value, Tolerance(max(tolerance.total, own), tolerance.slack)):
        return True
    return tolerance.limit is not None and close(got, value, tolerance)


def common_factor(pairs: Sequence[tuple[Any, np.ndarray]], tolerance: Tolerance = FLOAT32) -> float | None:
    """Return the factor by which every `got` differs from its `expected`; None if the pairs have no common factor."""
    if any(got is None or np.shape(got) != expected.shape or not np.any(expected) for got, expected in pairs):
        return None
    # The largest pair gives the factor: that of a small one is mostly rounding.
    got, expected = max(pairs, key=lambda pair: float(np.linalg.norm(pair[1])))
    factor = float(np.vdot(expected, got) / np.vdot(expected, expected))
    fits = np.isfinite(factor) and all(matches(got, expected * factor, tolerance) for got, expected in pairs)
    return factor if fits else None


def flat(arrays: Sequence[ArrayLike]) -> np.ndarray:
    """Return the numbers of all arrays as one array of float64."""
    return np.concatenate([np.empty(0), *(np.ravel(array).astype(np.float64) for array in arrays)])


def same_numbers(got: Sequence[ArrayLike], expected: Sequence[ArrayLike], rounding: float = 1e-4) -> bool:
    """Return whether both hold the same numbers, in any order, cut anywhere into tensors, and times one factor.

    Zeros do not count: they may fill up a buffer. Neither do inf and nan, of which the factor would be nan.
    """
    both = (flat(got), flat(expected))
    all_got, all_expected = (np.sort(numbers[(numbers != 0) & np.isfinite(numbers)]) for numbers in both)
    if all_got.shape != all_expected.shape:
        return False
    factor = np.linalg.norm(all_expected) / max(float(np.linalg.norm(all_got)), 1e-30)
    largest = float(np.abs(all_expected).max(initial=0))
    return np.allclose(all_got * factor, all_expected, rtol=rounding, atol=1e-6 * largest)


def proportional(
    got: Sequence[Any], expected: Sequence[np.ndarray], relative: float = 1e-4, smallest_norm: float = 0.0
) -> bool:  # fmt: skip
    """Return whether all arrays are as expected, times the same positive factor.

    Any positive factor will do: other tests judge whether gradients are divided and clipped correctly. The error of all
    arrays together may be `relative` times their norm; a norm below `smallest_norm` counts as `smallest_norm`.
    """
    for array, right in zip(got, expected, strict=True):
        if array is None or np.shape(array) != right.shape:
            return False
    all_got, all_expected = flat(got), flat(expected)
    factor = all_got @ all_expected / max(all_expected @ all_expected, 1e-30)
    limit = relative * factor * max(float(np.linalg.norm(all_expected)), smallest_norm)
    return bool(factor > 0 and np.linalg.norm(all_got - factor * all_expected) <= limit)


def difference(name: str, got: ArrayLike | None, expected: np.ndarray) -> str:
    """Say where two tensors differ. If all elements are wrong, the places are left out.

    `parameter 3 (4, 3) at [0, 1] [2, 2]: expected [0.12 0.5], got [0.36 1.5] (off by 1 at most)`
    """
    expected = np.asarray(expected)
    if got is None or isinstance(got, str):
        numbers = _numbers(np.ravel(expected)[:SHOWN], expected.size)
        return f"{name} {expected.shape}: expected {numbers}, got {got or 'no tensor'}"
    if np.shape(got) != expected.shape:
        return f"{name}: expected the shape {expected.shape}, got {np.shape(got)}"
    if not expected.ndim:
        return f"{name}: expected {float(expected):.6g}, got {float(np.asarray(got)):.6g}"
    got_numbers, expected_numbers = flat([got]), flat([expected])
    with np.errstate(all="ignore"):
        off = np.nan_to_num(np.abs(got_numbers - expected_numbers), nan=np.inf)
    off[(got_numbers == expected_numbers) | (np.isnan(got_numbers) & np.isnan(expected_numbers))] = 0
    worst = float(off.max(initial=0.0))
    wrong = np.flatnonzero(off > 0.01 * worst) if np.isfinite(worst) else np.flatnonzero(~np.isfinite(off))
    places, at = wrong[:SHOWN], ""
    if len(wrong) < len(off):
        at = " at " + " ".join(str([int(i) for i in np.unravel_index(place, expected.shape)]) for place in places)
    first_expected, first_got = (_numbers(numbers[places], len(wrong)) for numbers in (expected_numbers, got_numbers))
    return f"{name} {expected.shape}{at}: expected {first_expected}, got {first_got} (off by {worst:.2g} at most)"


def _numbers(values: np.ndarray, count: int) -> str:
    return "[" + " ".join(f"{x:.5g}" for x in values) + (" ...]" if count > len(values) else "]")
