"""Judges _clock_cycles: four rules, for every number of micro-batches and partitions up to 8. Breaks are drawn."""

from collections import Counter
from typing import Any

from common.grid import draw_schedule
from grader.grading import Grade

Pair = tuple[int, int]  # (micro-batch, partition)
Cycles = list[list[Pair]]
Cell = tuple[int, int]  # (clock, partition)
SIZES = [(m, n) for m in range(1, 9) for n in range(1, 9)]
MAX_PICTURE = 1500  # characters


def schedules(grade: Grade) -> dict[tuple[int, int], Cycles]:
    """The schedule of every size. Wrong if one is no list of lists of pairs."""
    (told,) = grade.values("grader.probes_pipeline:schedule", 1, sizes=[*map(list, SIZES)])
    found = {}
    for (m, n), cycles in zip(SIZES, told, strict=True):
        if isinstance(cycles, str):
            grade.fail(f"_clock_cycles({m}, {n}): expected a list for each clock cycle, got {cycles}")
        if strange := next((cycle for cycle in cycles if isinstance(cycle, str)), None):
            grade.fail(f"_clock_cycles({m}, {n}): expected (micro-batch, partition) pairs in a cycle, got {strange}")
        found[m, n] = [[(pair[0], pair[1]) for pair in cycle] for cycle in cycles]
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
    picture = draw_schedule(cycles, marked)[:MAX_PICTURE]
    grade.fail(f"{size[0]} micro-batches on {size[1]} partitions: {words}\n{picture}\n")


def once(m: int, n: int, cycles: Cycles) -> tuple[str, list[Cell]]:
    """Every micro-batch in every partition once, and nothing else: what is broken, and the bad cells."""
    every = {(i, j) for i in range(m) for j in range(n)}
    counts = Counter(pair for cycle in cycles for pair in cycle)
    strange = sorted(set(counts) - every)
    if strange and {(i, j) for j, i in counts} == every:
        return "a pair is (micro-batch, partition), and these are the other way round", []
    if strange:
        i, j = strange[0]
        what = f"partition {j}" if not 0 <= j < n else f"micro-batch {i}"
        bad = [(clock, j) for clock, cycle in enumerate(cycles) if strange[0] in cycle]
        return f"there is no {what}; pairs that do not exist are to be left out", bad
    if missing := sorted(every - set(counts)):
        i, j = missing[0]
        more = f", and {len(missing) - 1} more are missing" if len(missing) > 1 else ""
        return f"micro-batch {i} never comes to partition {j}{more}", [(i + j, j)]
    if twice := sorted(pair for pair, number in counts.items() if number > 1):
        i, j = twice[0]
        bad = [(clock, j) for clock, cycle in enumerate(cycles) if twice[0] in cycle]
        return f"micro-batch {i} comes to partition {j} {counts[twice[0]]} times", bad
    return "", []


def in_order(m: int, n: int, cycles: Cycles) -> tuple[str, list[Cell]]:
    """A micro-batch comes to a partition after it left the one before, and after the micro-batch before it."""
    clock_of = clocks_of(cycles)
    for (i, j), clock in sorted(clock_of.items(), key=lambda item: item[1]):
        before = clock_of.get((i, j - 1))
        if j > 0 and (before is None or before >= clock):
            seen = "is never there" if before is None else f"is there in clock {before}"
            return f"micro-batch {i} comes to partition {j} in clock {clock}, but to partition {j - 1} it {seen}", [
                (clock, j)
            ]
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


def as_short_as_can_be(m: int, n: int, cycles: Cycles) -> tuple[str, list[Cell]]:
    """M + N - 1 clock cycles, none of them empty."""
    empty = [clock for clock, cycle in enumerate(cycles) if not cycle]
    if empty:
        return f"nobody works in clock {empty[0]}: a cycle that has no pairs is to be left out", [
            (empty[0], j) for j in range(n)
        ]
    if len(cycles) != m + n - 1:
        return f"expected {m + n - 1} clock cycles, got {len(cycles)}: partitions are to work at the same time", []
    return "", []


def check(grade: Grade, rule: Any) -> None:
    """One rule for all sizes; the smallest size that breaks it is shown, and how many do."""
    found = schedules(grade)
    broken = {size: told for size in SIZES if (told := rule(*size, found[size]))[0]}
    if rule is not once and any(not cycles for cycles in found.values()):
        size = next(size for size in SIZES if not found[size])
        fail(grade, size, "expected clock cycles, got none at all", [], [])
    if broken:
        size = min(broken, key=lambda pair: (pair[0] + pair[1], pair))
        words, cells = broken[size]
        fail(grade, size, f"{words} ({len(broken)} of {len(SIZES)} sizes break this rule)", found[size], cells)
