"""Which sizes of partitions largest remainders allows."""

import pytest

from grader.partitions import counts_allowed


@pytest.mark.parametrize(
    ("length", "sizes", "allowed"),
    [
        (10, [0.7, 0.2, 0.1], [{7}, {2}, {1}]),
        (10, [1 / 3] * 3, [{3, 4}] * 3),  # one of three that lost as much
        (8, [0.7, 0.2, 0.1], [{5, 6}, {1, 2}, {1}]),  # 5.6, 1.6 and 0.8: the third lost most, the others are equal
        (100, [0.29, 0.71], [{29}, {71}]),
    ],
)
def test_who_lost_most_gets_one_more_and_only_equal_losses_are_free(length, sizes, allowed):
    assert counts_allowed(length, sizes) == allowed
