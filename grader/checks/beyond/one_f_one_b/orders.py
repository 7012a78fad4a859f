"""Judges the schedule of every stage by rules, for many numbers of micro-batches and stages.

The rules are those of the lesson's steps; whether a schedule is fast is seen by carrying it out, tick by tick.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from grader.checks.beyond.one_f_one_b.ticks import Action, carry_out, draw, gpipe
from grader.grading import Grade
from grader.ranks.phrases import short

FILE = "beyond/one_f_one_b.py"
SMALL = [(m, n) for m in range(1, 7) for n in range(1, 6)]
LARGER = [(16, 4), (3, 9), (9, 9), (32, 2), (12, 1)]
DRAWN = 3
Rule = Callable[[int, int, Sequence[list[Action]]], str]


def schedules(grade: Grade) -> dict[tuple[int, int], list[list[Action]]]:
    """(micro-batches, stages) -> the schedule of each stage. Wrong if one is no list of actions."""
    sizes = (
        SMALL + LARGER + [(int(m), int(n)) for m, n in np.random.default_rng(grade.seed).integers(7, 12, (DRAWN, 2))]
    )
    (found,) = grade.values("grader.probes.beyond.stages:orders", 1, sizes=[*map(list, sizes)])
    told = {}
    for (m, n), each in zip(sizes, found, strict=True):
        for stage, one in enumerate(each):
            call = f"one_f_one_b({m}, {n}, {stage})"
            if isinstance(one["actions"], str):
                grade.fail(
                    f'{call}: expected a list of Action("forward" or "backward", i), got {short(one["actions"])}'
                )
            if not one["same"]:
                grade.fail(
                    f"{call}: a second call, by keyword, gives a different list: begin every call with an empty one"
                )
        told[m, n] = [[(kind, number) for kind, number in one["actions"]] for one in each]
    return told


# --- the rules: what is broken, "" if nothing is ---


def once(m: int, n: int, schedule: Sequence[list[Action]]) -> str:
    """A forward and a backward of every micro-batch on every stage."""
    for stage, actions in enumerate(schedule):
        counts = Counter(actions)
        for kind in ("forward", "backward"):
            for i in range(m):
                number = counts.pop((kind, i), 0)
                if number != 1:
                    times = "no" if not number else str(number)
                    return f"stage {stage} has {times} {kind} of micro-batch {i}, expected one"
        if counts:
            kind, i = min(counts)
            return f"stage {stage} has a {kind} of micro-batch {i}; there are {m}, numbered from 0"
    return ""


def in_order(m: int, n: int, schedule: Sequence[list[Action]]) -> str:
    """Micro-batches in order, and no backward before its forward."""
    for stage, actions in enumerate(schedule):
        for kind in ("forward", "backward"):
            numbers = [i for one, i in actions if one == kind]
            if wrong := next(((a, b) for a, b in pairwise(numbers) if b < a), None):
                return f"stage {stage} takes the {kind} of micro-batch {wrong[0]} before that of micro-batch {wrong[1]}"
        for i in range(m):
            if actions.index(("backward", i)) < actions.index(("forward", i)):
                return f"stage {stage} has the backward of micro-batch {i} before its forward"
    return ""


def few_alive(m: int, n: int, schedule: Sequence[list[Action]]) -> str:
    """At most `stages - stage` micro-batches are alive."""
    for stage, actions in enumerate(schedule):
        alive = most_alive([kind for kind, _ in actions])
        if alive > n - stage:
            words = f"stage {stage} keeps {alive} micro-batches alive, expected at most {n - stage}"
            late = ": all forwards come before the first backward, as in GPipe" if alive == m else ""
            return f"{words}{late}"
    return ""


def most_alive(kinds: Sequence[str]) -> int:
    return max(accumulate((1 if kind == "forward" else -1 for kind in kinds), initial=0))


def warm_up(m: int, n: int, schedule: Sequence[list[Action]]) -> str:
    """The last stage makes one forward before its first backward, each stage before it one more: at most all."""
    before = [[kind for kind, _ in actions].index("backward") for actions in schedule]
    for stage in reversed(range(n)):
        if stage == n - 1:
            right, reason = 1, "the last stage starts its first backward right after its first forward"
        else:
            right = before[stage + 1] + 1 if before[stage + 1] < m else m
            reason = f"one more than stage {stage + 1}, and never more than {m}"
        if before[stage] != right:
            return f"stage {stage} makes {before[stage]} forwards before its first backward, expected {right}: {reason}"
    return ""


def alternating(m: int, n: int, schedule: Sequence[list[Action]]) -> str:
    """From the first backward to the last forward: one of each in turn."""
    for stage, actions in enumerate(schedule):
        kinds = [kind for kind, _ in actions]
        begin, end = kinds.index("backward"), len(kinds) - kinds[::-1].index("forward")
        for place, (one, other) in enumerate(pairwise(kinds[begin:end]), begin + 1):
            if one == other:
                return (
                    f"stage {stage} has two {one}s in a row, its actions {place - 1} and {place}: after the warm-up, "
                    "one forward and one backward in turn, until all forwards are made"
                )
    return ""


def no_slower_than_gpipe(m: int, n: int, schedule: Sequence[list[Action]]) -> str:
    """Carried out, it takes no longer than GPipe; also where a backward takes twice as long as a forward."""
    for ticks in (1, 2):
        mine, theirs = carry_out(schedule, ticks), carry_out(gpipe(m, n), ticks)
        if mine.stuck:
            return f"the stages wait for each other: {mine.stuck}"
        if mine.end > theirs.end:
            return (
                f"a step takes {mine.end} ticks, GPipe {theirs.end} (a forward takes 1 tick, a backward {ticks}): a "
                "stage waits though it has work"
            )
    return ""


def check(grade: Grade, *rules: Rule) -> None:
    """The rules, for all sizes; of the first one that is broken, the smallest size is shown."""
    found = schedules(grade)
    for rule in (*BASIC, *rules):
        broken = {size: words for size, schedule in found.items() if (words := rule(*size, schedule))}
        if broken:
            size = min(broken, key=lambda pair: (pair[0] + pair[1], pair))
            m, n = size
            back = {size: schedule[::-1] for size, schedule in found.items()}
            if not any(one(*size, back[size]) for size in back for one in (*BASIC, *rules)):
                broken[size] = f"the stages are in reverse order, stage 0 is the first one: {broken[size]}"
            micro, many = "micro-batches" if m > 1 else "micro-batch", "stages" if n > 1 else "stage"
            more = f" ({len(broken)} of {len(found)} sizes break this rule)"
            grade.fail(f"{m} {micro} on {n} {many}: {broken[size]}{more}\n{draw(found[size])}\n")


BASIC: tuple[Rule, ...] = (once, in_order)
