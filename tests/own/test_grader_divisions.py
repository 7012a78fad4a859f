"""The judges of a data set's division refuse no right one; the bank of mistakes shows what they catch."""

import random

import numpy as np
import pytest
import torch

from grader.verdicts import Wrong
from tests.task2b import mixing
from tests.task2b.test_partitions import check_counts

LENGTH = 60
PLACES = np.arange(LENGTH)


class Judge:
    """The part of Grade that these judges need."""

    def fail(self, message):
        raise Wrong(message)


def first_half(order):
    return np.isin(PLACES, np.asarray(order)[: LENGTH // 2])


def by_random(seed):
    order = list(range(LENGTH))
    random.Random(seed).shuffle(order)
    return first_half(order)


SHUFFLES = {
    "random": by_random,
    "numpy": lambda seed: first_half(np.random.default_rng(seed).permutation(LENGTH)),
    "torch": lambda seed: first_half(torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles_by_any_generator_are_mixed_and_differ(name):
    for first in range(0, 300, 6):
        halves = [SHUFFLES[name](seed) for seed in range(first, first + 6)]

        mixing.check_mixed(Judge(), halves)
    mixing.check_orders_differ(Judge(), halves)


def test_for_every_number_of_examples_there_is_a_limit():
    assert all(0 < mixing.most_alike(length) <= length // 2 + 1 for length in range(4, 200))
    assert mixing.most_alike(10) == 6  # equal halves of so few are no evidence
    assert mixing.most_alike(40) == 20


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
    check_counts(Judge(), length, sizes, counts)
