"""The schedule, p.2: four rules for _clock_cycles, for up to 8 micro-batches and partitions and some larger sizes.

The later rules count only for schedules in which every pair occurs exactly once: a missing pair breaks none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.grid import draw_schedule
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.phrases import short
from grader.wire.values import Fields

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context

graded = pytest.mark.graded
Size = tuple[int, int]  # micro-batches, partitions
Cycles = list[list[tuple[int, int]]]  # (micro-batch, partition) pairs by clock cycle
Broken = tuple[str, list[tuple[int, int]]]  # how a rule is broken, "" if it is not; the (clock, partition) to mark
Rule = Callable[[int, int, Cycles], Broken]
SIZES = [*((m, n) for m in range(1, 9) for n in range(1, 9)), (17, 3), (2, 11), (12, 12)]
EXAMPLE = (4, 2)  # is shown if it breaks a rule: small enough to draw, and not a special case
EXTRA_CLOCKS = 30  # beyond micro-batches and partitions; an endless schedule is cut off there
DRAWABLE = 100  # clock cycles and pairs that a picture can show


# --- what a rank does ---


def limited(number: int) -> int:
    return max(-(10**6), min(10**6, number))


def pairs_of(cycle: Any, most: int) -> list[list[int]] | str:
    """Return the pairs of one clock cycle, or a text that says what it is instead."""
    from operator import index

    kind = type(cycle).__name__[:60]
    if not hasattr(cycle, "__len__") or not hasattr(cycle, "__iter__"):
        return f"a {kind}, which can be read only once" if hasattr(cycle, "__next__") else f"a {kind}"
    if len(cycle) > most:
        return f"a {kind} of {limited(len(cycle))} pairs"
    pairs: list[list[int]] = []
    for pair in cycle:
        try:
            micro_batch, partition = map(index, pair)
        except (TypeError, ValueError):
            return f"a {kind} that holds a {type(pair).__name__[:60]}"
        pairs.append([limited(micro_batch), limited(partition)])
        if len(pairs) > most:
            break
    return pairs


def cycles_of(schedule: Any, clocks: int, most: int) -> list[list[list[int]] | str] | str:
    """Return the pairs of each clock cycle; a text in place of a cycle that changes later."""
    from itertools import islice

    if not hasattr(schedule, "__iter__"):
        return f"a {type(schedule).__name__[:60]}"
    cycles, values = [], []
    for cycle in islice(schedule, clocks):
        cycles.append(cycle)
        values.append(pairs_of(cycle, most))
        most -= len(values[-1]) if isinstance(values[-1], list) else 0
        if most <= 0:
            break
    for clock, (cycle, pairs) in enumerate(zip(cycles, values, strict=True)):
        if isinstance(pairs, list) and pairs_of(cycle, len(pairs)) != pairs:
            values[clock] = "a list that changes once the next cycle is made: begin a new list for every cycle"
    return values


@in_rank(uses=[limited, pairs_of, cycles_of], join=False)
def schedules(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield the schedule of each size, if a second call returns the same."""
    for m, n in context.arguments["sizes"]:
        context.during = f"_clock_cycles({m}, {n})"
        limits = m + n + context.arguments["extra_clocks"], m * n + 100
        first, second = (cycles_of(lesson._clock_cycles(m, n), *limits) for _ in range(2))
        yield first if first == second or isinstance(first, str) else "a different schedule when called again"


# --- the rules ---


def once(m: int, n: int, cycles: Cycles) -> Broken:
    """Say whether every micro-batch is in every partition exactly once, and nothing else is."""
    every = {(i, j) for i in range(m) for j in range(n)}
    counts = Counter(pair for cycle in cycles for pair in cycle)
    if set(counts) != every and {(i, j) for j, i in counts} == every:
        return "a pair is (micro-batch, partition), but these are swapped", []
    wrong = [*sorted(set(counts) - every), *sorted(every - set(counts)), *sorted(p for p in counts if counts[p] > 1)]
    if not wrong:
        return "", []
    i, j = wrong[0]
    marked = [(clock, j) for clock, cycle in enumerate(cycles) if (i, j) in cycle]
    if (i, j) not in every:
        what = f"partition {j}" if not 0 <= j < n else f"micro-batch {i}"
        return f"there is no {what}; leave out pairs that do not exist", marked
    if marked:
        return f"the pair ({i}, {j}) occurs {counts[i, j]} times", marked
    missing = len(every - set(counts))
    if cycles and all(sum(pair) >= len(cycles) for pair in every - set(counts)):
        words = f"the schedule stops after {len(cycles)} of {m + n - 1} clock cycles"
        return f"{words}: the last micro-batch needs one cycle for each of the {n} partitions", []
    more = f", and {missing - 1} more are missing" if missing > 1 else ""
    rule = f"in clock k, partition j works on micro-batch k - j, if there is one (0 to num_batches - 1, here {m - 1})"
    return f"micro-batch {i} never reaches partition {j}{more}: {rule}", [(earliest((i, j), clocks_of(cycles)), j)]


def in_order(m: int, n: int, cycles: Cycles) -> Broken:
    """Say whether each micro-batch enters a partition after the partition before, and after the micro-batch before."""
    clock_of = clocks_of(cycles)
    for (i, j), clock in sorted(clock_of.items(), key=lambda item: item[1]):
        before, earlier = clock_of.get((i, j - 1), len(cycles)), clock_of.get((i - 1, j), -1)
        if j > 0 and before >= clock:
            words = f"micro-batch {i} is in partition {j} in clock {clock}, but in partition {j - 1} only in clock"
            return f"{words} {before}", [(clock, j)]
        if earlier > clock:
            return f"partition {j} works on micro-batch {i} before micro-batch {i - 1}", [(clock, j)]
    return "", []


def one_at_a_time(m: int, n: int, cycles: Cycles) -> Broken:
    """Say whether a partition works on one micro-batch in each clock cycle."""
    for clock, cycle in enumerate(cycles):
        for j, number in Counter(j for _, j in cycle).items():
            if number > 1:
                return f"in clock {clock} partition {j} is given {number} micro-batches at once", [(clock, j)]
    return "", []


def short_as_possible(m: int, n: int, cycles: Cycles) -> Broken:
    """Say whether no clock cycle is empty and no pair waits longer than it must, if the other rules are kept."""
    for rule in (in_order, one_at_a_time):
        words, marked = rule(m, n, cycles)
        if words:
            return words, marked
    if [] in cycles:
        clock = cycles.index([])
        count = f"expected {m + n - 1} clock cycles, got {len(cycles)}"
        return f"clock {clock} is empty: leave out cycles without pairs ({count})", [(clock, j) for j in range(n)]
    clock_of = clocks_of(cycles)
    for (i, j), clock in sorted(clock_of.items(), key=lambda item: item[1]):
        if clock > (possible := earliest((i, j), clock_of)):
            words = f"partition {j} works on micro-batch {i} in clock {clock}, but could do so in clock {possible}"
            return f"{words}: every partition must work as soon as its input is ready", [(possible, j)]
    return "", []


def right_cycles(m: int, n: int) -> Cycles:
    """Return the schedule in which every pair comes as early as it can."""
    clock_of: dict[tuple[int, int], int] = {}
    for pair in ((i, j) for i in range(m) for j in range(n)):
        clock_of[pair] = earliest(pair, clock_of)
    return [[pair for pair in clock_of if clock_of[pair] == clock] for clock in sorted({*clock_of.values()})]


def clocks_of(cycles: Cycles) -> dict[tuple[int, int], int]:
    """Return the first clock cycle of each pair."""
    return {pair: clock for clock, cycle in reversed([*enumerate(cycles)]) for pair in cycle}


def earliest(pair: tuple[int, int], clock_of: dict[tuple[int, int], int]) -> int:
    """Return the first clock after those of the two pairs that this one waits for."""
    i, j = pair
    return max([clock_of[before] + 1 for before in ((i, j - 1), (i - 1, j)) if before in clock_of], default=0)


RULES: tuple[Rule, ...] = (once, in_order, one_at_a_time, short_as_possible)


# --- what is judged ---


def schedules_of(grade: Grade) -> dict[Size, Cycles]:
    """Return the schedule of every size. Fail if one is no list of lists of pairs."""
    drawn = np.random.default_rng(grade.seed).integers(9, 13, size=(3, 2)).tolist()
    sizes = [*SIZES, *((m, n) for m, n in drawn)]
    (results,) = run(grade, schedules, [None], sizes=[list(size) for size in sizes], extra_clocks=EXTRA_CLOCKS).values
    by_size = {}
    for (m, n), cycles in zip(sizes, results, strict=True):
        call = f"_clock_cycles({m}, {n})"
        if isinstance(cycles, str):
            grade.fail(observed=f"{call}: expected a list for each clock cycle, got {short(cycles, 100)}")
        if strange := next((cycle for cycle in cycles if isinstance(cycle, str)), None):
            words = "expected a list of (micro-batch, partition) pairs for a clock cycle, got"
            grade.fail(f"{call}: {words} {short(strange, 150)}")
        if len(cycles) >= m + n + EXTRA_CLOCKS and len(cycles) > m * n:
            grade.fail(f"{call}: got {len(cycles)} clock cycles and more: does its loop never end?")
        by_size[m, n] = [[(pair[0], pair[1]) for pair in cycle] for cycle in cycles]
    return by_size


def fail_with_picture(grade: Grade, size: Size, words: str, cycles: Cycles, marked: list[tuple[int, int]]) -> None:
    """Fail, and show the schedule as a grid."""
    pairs = [pair for cycle in cycles for pair in cycle]
    is_short = len(cycles) + len(pairs) <= DRAWABLE + size[0] * size[1]
    is_narrow = max(map(max, pairs), default=0) <= DRAWABLE
    picture = draw_schedule(cycles, marked)[:1500] if is_short and is_narrow else ""
    grade.fail(f"_clock_cycles({size[0]}, {size[1]}): {words}\n{picture}\n")


def check_rules(grade: Grade, size: Size, cycles: Cycles) -> None:
    """Check the schedule of a Pipe.forward that does not call _clock_cycles (p.3)."""
    for rule in RULES:
        words, marked = rule(*size, cycles)
        if words:
            fail_with_picture(grade, size, f"_clock_cycles was not called, and {words}", cycles, marked)


def check_rule(grade: Grade, rule: Rule) -> None:
    """Check `once` and then a rule, for all sizes. Show EXAMPLE if it is wrong, else the smallest wrong size."""
    by_size = schedules_of(grade)
    if rule is not once and not by_size[EXAMPLE]:
        fail_with_picture(grade, EXAMPLE, "expected clock cycles, got none at all", [], [])
    for each in dict.fromkeys((once, rule)):
        # A schedule that is too long was cut off, so what it seems to lack is not the cause.
        judged = [size for size in by_size if each is rule or len(by_size[size]) < sum(size) + EXTRA_CLOCKS]
        broken = {size: answer for size in judged if (answer := each(*size, by_size[size]))[0]}
        if broken:
            size = EXAMPLE if EXAMPLE in broken else min(broken, key=lambda size: (sum(size), size))
            words, marked = broken[size]
            count = f"wrong for {len(broken)} of {len(by_size)} numbers of micro-batches and partitions"
            fail_with_picture(grade, size, f"{words} ({count})", by_size[size], marked)


# --- the graded tests ---


@graded("p.2", absence=True)  # two nested loops pass it
def test_every_micro_batch_comes_to_every_partition_once(grade: Grade) -> None:
    check_rule(grade, once)


@graded("p.2", absence=True)
def test_micro_batches_go_from_partition_to_partition_in_order(grade: Grade) -> None:
    check_rule(grade, in_order)


@graded("p.2", absence=True)
def test_a_partition_has_one_micro_batch_in_a_clock_cycle(grade: Grade) -> None:
    check_rule(grade, one_at_a_time)


@graded("p.2", weight=2)
def test_the_schedule_is_as_short_as_it_can_be(grade: Grade) -> None:
    check_rule(grade, short_as_possible)


@graded("p.2", absence=True)
def test_the_schedule_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed("common/schedule.py")
