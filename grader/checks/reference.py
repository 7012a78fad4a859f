"""Comparisons of arrays for the judges in checks/beyond/, and for no others: see grader/arithmetic.py."""

from collections.abc import Mapping

import numpy as np

from grader import arithmetic


def norm(arrays: Mapping[str, np.ndarray]) -> float:
    """The norm of all of them together."""
    return arithmetic.norm(list(arrays.values()))


def close(got: np.ndarray | None, expected: np.ndarray, total: float, slack: float = 1.0) -> bool:
    """Whether every element is as expected, see grader/arithmetic.py. `slack` widens the limit where a rank has
    computed in float32 what is compared."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf and nan are close to nothing
        return arithmetic.close(got, expected, arithmetic.Tolerance(total, slack))
