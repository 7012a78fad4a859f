"""Which sizes of partitions the judges accept: those of largest remainders, the first of equal sizes up."""

import types

import pytest

from tests.task2b.test_partitions import check_counts


class RefusedError(Exception):
    pass


def fail(message):
    raise RefusedError(message)


GRADE = types.SimpleNamespace(fail=fail)


@pytest.mark.parametrize(
    ("length", "sizes", "counts"),
    [
        (10, [0.7, 0.2, 0.1], [7, 2, 1]),
        (10, [1 / 3] * 3, [4, 3, 3]),
        (8, [0.7, 0.2, 0.1], [5, 2, 1]),  # 5.6, 1.6 and 0.8: the third lost most, the other two equally much
        (8, [0.7, 0.2, 0.1], [6, 1, 1]),
        (100, [0.29, 0.71], [29, 71]),
        (3, [0.25] * 4, [1, 1, 1, 0]),
        (4, [0.5, 0.0, 0.5], [2, 0, 2]),
    ],
)
def test_the_sizes_of_largest_remainders_are_accepted(length, sizes, counts):
    check_counts(GRADE, length, sizes, counts)


@pytest.mark.parametrize(
    ("length", "sizes", "counts", "words"),
    [
        (10, [1 / 3] * 3, [3, 3, 4], "of equal sizes the first ones"),
        (10, [1 / 3] * 3, [3, 3, 3], "got partitions of"),
        (10, [1 / 3] * 3, [5, 3, 2], "not its share rounded"),
        (8, [0.7, 0.2, 0.1], [6, 2, 0], "loses more by rounding down"),
        (6, [0.45, 0.45, 0.1], [3, 2, 1], "loses more by rounding down"),
        (100, [0.29, 0.71], [28, 72], "not its share rounded"),
        (9, [0.25] * 4, [2, 2, 2, 3], "of equal sizes the first ones"),
    ],
)
def test_other_sizes_are_refused_with_the_rule_that_they_break(length, sizes, counts, words):
    with pytest.raises(RefusedError, match=words):
        check_counts(GRADE, length, sizes, counts)
