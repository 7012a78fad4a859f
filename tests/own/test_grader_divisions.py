"""Which divisions of a data set its judges accept: shuffled ones, and sizes of largest remainders."""

import contextlib
import random

import numpy as np
import pytest
import torch

from grader.verdicts import Verdict, Wrong
from tests.task2b import mixing
from tests.task2b.test_partitions import check_counts

LENGTH, SEEDS = 60, [3, 10, 11, 500, 77_777, 999_999]
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
IN_TURN = {
    "blocks": lambda seed: (PLACES + seed) % LENGTH < LENGTH // 2,
    "one by one": lambda seed: (PLACES + seed) % 2 == 0,
    **{f"in groups of {size}": lambda seed, size=size: (PLACES + seed) // size % 2 == 0 for size in (2, 3, 5, 6, 10)},
    "always the same pattern of five": lambda seed: np.isin(PLACES % 10, [0, 1, 3, 4, 7]),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles_by_any_generator_are_mixed_and_differ(name):
    for first in range(0, 300, 6):
        halves = [SHUFFLES[name](seed) for seed in range(first, first + 6)]

        mixing.check_mixed(Judge(), halves)
    mixing.check_orders_differ(Judge(), halves)


@pytest.mark.parametrize("name", IN_TURN)
def test_examples_dealt_out_by_any_rule_that_repeats_are_not_mixed(name):
    halves = [IN_TURN[name](seed) for seed in SEEDS]

    with pytest.raises(Verdict):
        mixing.check_mixed(Judge(), halves)


@pytest.mark.parametrize("turn", [lambda half: half, lambda half: half[::-1], lambda half: ~half])
def test_one_shuffle_moved_along_by_the_seed_is_the_same_order(turn):
    shuffled = by_random(7)
    halves = [turn(np.roll(shuffled, seed)) if seed % 2 else np.roll(shuffled, seed) for seed in SEEDS]

    with pytest.raises(Verdict, match="only shifted"):
        mixing.check_orders_differ(Judge(), halves)


def test_for_every_number_of_examples_there_is_a_limit():
    assert all(0 < mixing.most_alike(length) <= length // 2 + 1 for length in range(4, 200))
    assert mixing.most_alike(10) == 6  # equal halves of so few are no evidence
    assert mixing.most_alike(40) == 20


@pytest.mark.parametrize(("length", "sizes", "counts", "words"), [
    (10, [0.7, 0.2, 0.1], [7, 2, 1], ""),
    (10, [1 / 3] * 3, [4, 3, 3], ""),
    (8, [0.7, 0.2, 0.1], [5, 2, 1], ""),  # 5.6, 1.6 and 0.8: the third lost most, the other two equally much
    (8, [0.7, 0.2, 0.1], [6, 1, 1], ""),
    (100, [0.29, 0.71], [29, 71], ""),
    (3, [0.25] * 4, [1, 1, 1, 0], ""),
    (4, [0.5, 0.0, 0.5], [2, 0, 2], ""),
    (10, [1 / 3] * 3, [3, 3, 4], "of equal sizes the first ones"),
    (10, [1 / 3] * 3, [3, 3, 3], "got partitions of"),
    (10, [1 / 3] * 3, [5, 3, 2], "not its share rounded"),
    (8, [0.7, 0.2, 0.1], [6, 2, 0], "loses more by rounding down"),
    (6, [0.45, 0.45, 0.1], [3, 2, 1], "not the places where partitions begin"),
    (100, [0.29, 0.71], [28, 72], "not its share rounded"),
    (9, [0.25] * 4, [2, 2, 2, 3], "of equal sizes the first ones"),
])  # fmt: skip
def test_only_sizes_of_largest_remainders_are_accepted(length, sizes, counts, words):
    accepted = contextlib.nullcontext() if not words else pytest.raises(Wrong, match=words)

    with accepted:
        check_counts(Judge(), length, sizes, counts)
