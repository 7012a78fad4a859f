"""Judges _clock_cycles by four rules, for all numbers of micro-batches and partitions up to 8 and some that are drawn.

The other rules judge only schedules in which every pair occurs exactly once: what is not there breaks none of them.
"""

from collections import Counter
from typing import Any

import numpy as np

from common.grid import draw_schedule
from grader.grading import Grade
from grader.ranks.phrases import short

Pair = tuple[int, int]  # (micro-batch, partition)
Cycles = list[list[Pair]]
Cell = tuple[int, int]  # (clock, partition)
SMALL = [(m, n) for m in range(1, 9) for n in range(1, 9)]
LARGER = [(17, 3), (2, 11), (12, 12)]
DRAWN = 3  # sizes
EXAMPLE = (4, 2)  # shown if it breaks a rule: small enough to draw, and not a special case
ENDLESS = 30  # clock cycles beyond micro-batches and partitions: there the probe cuts a schedule off
MAX_PICTURE = 1500  # characters
DRAWABLE = 100  # clock cycles and pairs that a picture can show


def schedules(grade: Grade) -> dict[tuple[int, int], Cycles]:
    """The schedule of every size. Wrong if one is no list of lists of pairs."""
    drawn = np.random.default_rng(grade.seed).integers(9, 13, size=(DRAWN, 2))
    sizes = SMALL + LARGER + [(int(m), int(n)) for m, n in drawn]
    (results,) = grade.values("grader.probes.pipeline.split:schedule", 1, sizes=[*map(list, sizes)])
    found = {}
    for (m, n), cycles in zip(sizes, results, strict=True):
        call = f"_clock_cycles({m}, {n})"
        if isinstance(cycles, str):
            grade.fail(f"{call}: expected a list for each clock cycle, got {short(cycles, 100)}")
        if strange := next((cycle for cycle in cycles if isinstance(cycle, str)), None):
            words = "expected a list of (micro-batch, partition) pairs for a clock cycle, got"
            grade.fail(f"{call}: {words} {short(strange, 150)}")
        found[m, n] = [[(pair[0], pair[1]) for pair in cycle] for cycle in cycles]
        if len(cycles) >= m + n + ENDLESS and len(cycles) > m * n:
            grade.fail(f"{call}: got {len(cycles)} clock cycles and more: does its loop never end?")
    return found


def clocks_of(cycles: Cycles) -> dict[Pair, int]:
    """The first clock cycle of each pair."""
    clock_of: dict[Pair, int] = {}
    for clock, cycle in enumerate(cycles):
        for pair in cycle:
            clock_of.setdefault(pair, clock)
    return clock_of


def fail(grade: Grade, size: tuple[int, int], words: str, cycles: Cycles, marked: list[Cell]) -> None:
    """Wrong, with the schedule as a grid."""
    pairs = [pair for cycle in cycles for pair in cycle]
    drawable = len(cycles) + len(pairs) <= DRAWABLE + size[0] * size[1] and max(map(max, pairs), default=0) <= DRAWABLE
    picture = draw_schedule(cycles, marked)[:MAX_PICTURE] if drawable else ""
    grade.fail(f"_clock_cycles({size[0]}, {size[1]}): {words}\n{picture}\n")


def once(m: int, n: int, cycles: Cycles) -> tuple[str, list[Cell]]:
    """Every micro-batch in every partition once, and nothing else: what is broken, and the bad cells."""
    every = {(i, j) for i in range(m) for j in range(n)}
    counts = Counter(pair for cycle in cycles for pair in cycle)
    strange = sorted(set(counts) - every)
    if strange and {(i, j) for j, i in counts} == every:
        return "a pair is (micro-batch, partition), but these are swapped", []
    if strange:
        i, j = strange[0]
        what = f"partition {j}" if not 0 <= j < n else f"micro-batch {i}"
        bad = [(clock, j) for clock, cycle in enumerate(cycles) if strange[0] in cycle]
        return f"there is no {what}; leave out pairs that do not exist", bad
    if missing := sorted(every - set(counts)):
        i, j = missing[0]
        more = f", and {len(missing) - 1} more are missing" if len(missing) > 1 else ""
        return f"micro-batch {i} never reaches partition {j}{more}", [(_earliest((i, j), clocks_of(cycles)), j)]
    if twice := sorted(pair for pair, number in counts.items() if number > 1):
        i, j = twice[0]
        bad = [(clock, j) for clock, cycle in enumerate(cycles) if twice[0] in cycle]
        return f"the pair ({i}, {j}) occurs {counts[twice[0]]} times", bad
    return "", []


def in_order(m: int, n: int, cycles: Cycles) -> tuple[str, list[Cell]]:
    """A micro-batch comes to a partition after it left the one before, and after the micro-batch before it."""
    clock_of = clocks_of(cycles)
    for (i, j), clock in sorted(clock_of.items(), key=lambda item: item[1]):
        before = clock_of.get((i, j - 1))
        if j > 0 and (before is None or before >= clock):
            seen = "never" if before is None else f"only in clock {before}"
            words = f"micro-batch {i} is in partition {j} in clock {clock}, but in partition {j - 1} {seen}"
            return words, [(clock, j)]
        earlier = clock_of.get((i - 1, j))
        if i > 0 and earlier is not None and earlier > clock:
            return f"partition {j} works on micro-batch {i} before micro-batch {i - 1}", [(clock, j)]
    return "", []


def one_at_a_time(m: int, n: int, cycles: Cycles) -> tuple[str, list[Cell]]:
    """A partition works on one micro-batch in a clock cycle."""
    for clock, cycle in enumerate(cycles):
        for j, number in Counter(j for _, j in cycle).items():
            if number > 1:
                return f"in clock {clock} partition {j} is given {number} micro-batches at once", [(clock, j)]
    return "", []


def _earliest(pair: Pair, clock_of: dict[Pair, int]) -> int:
    """The first clock after those of the two pairs that this one waits for."""
    i, j = pair
    return max([clock_of[before] + 1 for before in ((i, j - 1), (i - 1, j)) if before in clock_of], default=0)


def as_short_as_can_be(m: int, n: int, cycles: Cycles) -> tuple[str, list[Cell]]:
    """No clock cycle is empty, and no pair waits for longer than it must, in a schedule that keeps the other rules."""
    for rule in (in_order, one_at_a_time):
        words, cells = rule(m, n, cycles)
        if words:
            return words, cells
    empty = [clock for clock, cycle in enumerate(cycles) if not cycle]
    if empty:
        words = f"clock {empty[0]} is empty: leave out cycles without pairs"
        count = f"expected {m + n - 1} clock cycles, got {len(cycles)}"
        return f"{words} ({count})", [(empty[0], j) for j in range(n)]
    clock_of = clocks_of(cycles)
    for (i, j), clock in sorted(clock_of.items(), key=lambda item: item[1]):
        if clock > (earliest := _earliest((i, j), clock_of)):
            words = f"partition {j} works on micro-batch {i} in clock {clock}, but could do so in clock {earliest}"
            return f"{words}: every partition must work as soon as its input is ready", [(earliest, j)]
    return "", []


def check(grade: Grade, rule: Any) -> None:
    """One rule for all sizes; EXAMPLE is shown if it breaks it, else the smallest size that does, and how many do.

    Before it `once`: of a schedule with other pairs, that is the cause.
    """
    found = schedules(grade)
    if rule is not once and not found[EXAMPLE]:
        fail(grade, EXAMPLE, "expected clock cycles, got none at all", [], [])
    for one in dict.fromkeys((once, rule)):
        # A schedule that is too long was cut off, so what it seems to lack is not the cause.
        judged = [size for size in found if one is rule or len(found[size]) < sum(size) + ENDLESS]
        broken = {size: answer for size in judged if (answer := one(*size, found[size]))[0]}
        if broken:
            size = EXAMPLE if EXAMPLE in broken else min(broken, key=lambda pair: (pair[0] + pair[1], pair))
            words, cells = broken[size]
            count = f"wrong for {len(broken)} of {len(found)} numbers of micro-batches and partitions"
            fail(grade, size, f"{words} ({count})", found[size], cells)
