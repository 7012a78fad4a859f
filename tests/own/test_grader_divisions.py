"""The judges of a data set's division refuse no right one; the bank of mistakes shows what they catch."""

import random

import numpy as np
import pytest
import torch

from common.paths import ROOT
from tests.own.inline_student import view_of
from tests.task2b import mixing
from tests.task2b.test_partitions import check_counts

LENGTH = 60
GRADE = view_of(ROOT, "2b.3")


def by_random(seed):
    order = list(range(LENGTH))
    random.Random(seed).shuffle(order)
    return order


@pytest.mark.parametrize("shuffled", [
    by_random,
    lambda seed: np.random.default_rng(seed).permutation(LENGTH),
    lambda seed: torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)).numpy(),
], ids=["random", "numpy", "torch"])  # fmt: skip
def test_shuffles_by_any_generator_are_mixed_and_differ(shuffled):
    for first in range(0, 300, 6):
        orders = [np.asarray(shuffled(seed)) for seed in range(first, first + 6)]
        halves = [np.isin(np.arange(LENGTH), order[: LENGTH // 2]) for order in orders]

        mixing.check_mixed(GRADE, halves)
    mixing.check_orders_differ(GRADE, halves)


@pytest.mark.parametrize(("length", "sizes", "counts"), [
    (10, [0.7, 0.2, 0.1], [7, 2, 1]),
    (10, [1 / 3] * 3, [4, 3, 3]),
    (8, [0.7, 0.2, 0.1], [5, 2, 1]),  # 5.6, 1.6 and 0.8: the third lost most, the other two equally much
    (8, [0.7, 0.2, 0.1], [6, 1, 1]),
    (100, [0.29, 0.71], [29, 71]),
    (3, [0.25] * 4, [1, 1, 1, 0]),
    (4, [0.5, 0.0, 0.5], [2, 0, 2]),
])  # fmt: skip
def test_all_sizes_of_largest_remainders_are_accepted(length, sizes, counts):
    check_counts(GRADE, length, sizes, counts)
