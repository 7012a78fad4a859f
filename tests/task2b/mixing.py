"""Judges whether examples were divided at random: who is in the first half follows neither the order of the data nor,
from one seed to the next, the same order moved along.

A right solution fails in fewer than one of ten million runs, whichever generator shuffles: check_mixed makes 55
comparisons of a sum of many signs, each beyond FAR standard deviations with a chance of 3e-12, and check_orders_differ
1800 for six draws, each with a chance of 4e-12. Halves are given as arrays of bool, place by place, one for each draw.
"""

import itertools
import math

import numpy as np

from grader.grading import Grade

FAR = 7  # standard deviations
LAGS = 20
GROUPS = range(2, 9)
APART = 2e-12  # the chance of two shuffles to agree as much as these may, for one shift


def check_mixed(grade: Grade, halves: list[np.ndarray]) -> None:
    """Fails unless the halves of all draws together look shuffled.

    At a lag of k count where the example k places further is in the other half. Of n examples a shuffle gives
    (n - k) / 2 such places on average; blocks give few at a lag of 1, dealing out in turn many, and dealing out in
    groups of k few or many at a lag of k. Then count the first half among the places with the same remainder.
    """
    length = len(halves[0])
    for lag in range(1, min(LAGS, length // 3) + 1):
        changes = sum(int((half[:-lag] != half[lag:]).sum()) for half in halves)
        of = len(halves) * (length - lag)
        far = changes - of / 2 * length / (length - 1)
        if far < -FAR * math.sqrt(of) / 2:
            what = (
                "are blocks in the order of the data" if lag == 1 else f"repeat the data's order every {lag} examples"
            )
            grade.fail(f"the partitions {what}: shuffle the indices; otherwise equal labels stay together")
        if far > FAR * math.sqrt(of) / 2:
            grade.fail("the examples are assigned round-robin, in the order of the data: shuffle the indices")
    for groups in GROUPS:
        for place in range(groups):
            mine = [half[place::groups] for half in halves]
            if abs(sum(int(m.sum()) - len(m) / 2 for m in mine)) > FAR * math.sqrt(sum(map(len, mine))) / 2:
                grade.fail(
                    f"too many examples at distance {groups} are in the same partition: the examples are assigned "
                    "round-robin; shuffle the indices"
                )


def check_orders_differ(grade: Grade, halves: list[np.ndarray]) -> None:
    """Fails if one seed divides as another one does, moved along, backwards, or with the halves exchanged."""
    most = most_alike(len(halves[0]))
    for one, other in itertools.combinations(halves, 2):
        for turned in (other, other[::-1]):
            for shift in range(len(other)):
                alike = int((one & np.roll(turned, shift)).sum())
                if not int(one.sum()) - most < alike < most:
                    grade.fail(
                        "a different seed gives the same division, only shifted: shuffle the indices with a generator "
                        "made from seed"
                    )


def most_alike(length: int) -> int:
    """The fewest examples, common to the first halves of two shuffles, that chance does not explain."""
    half = length // 2
    ways = math.comb(length, half)
    chances = [math.comb(half, same) * math.comb(length - half, half - same) / ways for same in range(half + 1)]
    # Of short data no number is rare enough. Then all must be common, if chance gives that once in 10^10 or less.
    none_is = half if chances[half] < 1e-10 else half + 1
    return next((same for same in range(half + 1) if sum(chances[same:]) < APART), none_is)
