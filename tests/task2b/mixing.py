"""Judges whether examples are divided at random.

The first half must not follow the order of the data (check_mixed). Two seeds must not give the same half, nor the same
half shifted (check_orders_differ). A half is an array of bool: whether the example at each place of the data is in it.

A right solution fails in fewer than one of ten million runs, whichever generator shuffles: check_mixed makes 110
comparisons of a sum of many signs, each beyond FAR standard deviations with a chance of 3e-12, and check_orders_differ
1800 for six draws, each with a chance of 4e-12.
"""

import itertools
import math

import numpy as np

from grader.grading import Grade

FAR = 7  # standard deviations
LAGS = 20
DISTANCES = range(2, 9)
RARE = 2e-12  # if two shuffles have so much in common only with this chance, for one shift, they are not shuffles


def check_mixed(grade: Grade, halves: list[np.ndarray]) -> None:
    """Fail unless the halves of all draws together look shuffled.

    First, for each lag k: count the places whose example k places further is in the other half. Half of all places is
    normal. Blocks of data give fewer at a lag of 1, round-robin gives more, and groups of k examples give fewer or more
    at a lag of k. Then, for each distance: count the first half among the places 0, distance, 2 * distance, ...
    """
    length = len(halves[0])
    for lag in range(1, min(LAGS, length // 3) + 1):
        changes = sum(int((half[:-lag] != half[lag:]).sum()) for half in halves)
        places = len(halves) * (length - lag)
        excess = changes - places / 2 * length / (length - 1)
        limit = FAR * math.sqrt(places) / 2
        if excess < -limit:
            what = (
                "are blocks in the order of the data" if lag == 1 else f"repeat the data's order every {lag} examples"
            )
            grade.fail(f"the partitions {what}: shuffle the indices; otherwise equal labels stay together")
        if excess > limit:
            grade.fail("the examples are assigned round-robin, in the order of the data: shuffle the indices")
    for distance in DISTANCES:
        for first in range(distance):
            in_half = np.concatenate([half[first::distance] for half in halves])
            excess = int(in_half.sum()) - len(in_half) / 2
            if abs(excess) > FAR * math.sqrt(len(in_half)) / 2:
                grade.fail(
                    f"too many examples at distance {distance} are in the same partition: the examples are assigned "
                    "round-robin; shuffle the indices"
                )


def check_orders_differ(grade: Grade, halves: list[np.ndarray]) -> None:
    """Fail if two seeds give the same division: shifted, backwards, or with the halves exchanged."""
    most = most_alike(len(halves[0]))
    for one, other in itertools.combinations(halves, 2):
        for direction in (other, other[::-1]):
            for shift in range(len(other)):
                in_both = int((one & np.roll(direction, shift)).sum())
                too_many, too_few = in_both >= most, in_both <= int(one.sum()) - most
                if too_many or too_few:
                    grade.fail(
                        "a different seed gives the same division, only shifted: shuffle the indices with a generator "
                        "made from seed"
                    )


def most_alike(length: int) -> int:
    """Return how many examples two first halves must have in common, at least, so that chance does not explain it."""
    half = length // 2
    ways = math.comb(length, half)
    chances = [math.comb(half, same) * math.comb(length - half, half - same) / ways for same in range(half + 1)]
    # Of short data no number is rare enough. Then all must be common, if chance gives that once in 10^10 or less.
    none_is = half if chances[half] < 1e-10 else half + 1
    return next((same for same in range(half + 1) if sum(chances[same:]) < RARE), none_is)
