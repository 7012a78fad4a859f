"""Judges members and make_groups: literal grids, and a sum over each group that a rank gets."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import RankResult, Result
from grader.ranks.phrases import short
from grader.wire import drawn
from grader.wire.values import Fields

FILE = "beyond/grid.py"
KINDS = ("pipeline", "data", "tensor")
Lists = list[list[int]]
Sizes = tuple[int, int, int]  # pipeline, data, tensor
GRIDS: dict[Sizes, tuple[Lists, Lists, Lists]] = {  # the groups of each kind
    (1, 1, 1): ([[0]], [[0]], [[0]]),
    (1, 3, 2): ([[0], [1], [2], [3], [4], [5]], [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]),
    (1, 2, 2): ([[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
    (2, 2, 1): ([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
    (2, 1, 2): ([[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]),
    (1, 1, 3): ([[0], [1], [2]], [[0], [1], [2]], [[0, 1, 2]]),
    (3, 2, 1): ([[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]], [[0], [1], [2], [3], [4], [5]]),
    (2, 2, 2): (
        [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
    ),
    (2, 3, 2): (
        [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]], [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]],
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
    ),
    (3, 1, 4): (
        [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]], [[i] for i in range(12)],
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    ),
}  # fmt: skip
MADE: tuple[Sizes, ...] = ((1, 2, 2), (3, 2, 1), (2, 1, 2), (2, 2, 2), (1, 1, 1))


def words(sizes: Sizes) -> str:
    """`pipeline=2, data=2, tensor=1`"""
    return ", ".join(f"{kind}={size}" for kind, size in zip(KINDS, sizes, strict=True))


def check_members(grade: Grade) -> None:
    (found,) = grade.values("grader.probes.beyond.stages:members", 1, grids=[list(sizes) for sizes in GRIDS])
    for (sizes, right), told in zip(GRIDS.items(), found, strict=True):
        where = f"members of a grid with {words(sizes)}"
        if sorted(told["kinds"]) != sorted(KINDS):
            got = short(str(told["kinds"])) if told["type"] == "dict" else f"a {told['type']}"
            grade.fail(f"{where}: expected a dict with pipeline, data and tensor, got {got}")
        for kind, lists in zip(KINDS, right, strict=True):
            got = told["groups"][kind]
            if got != lists:
                cause = _name(got, lists, dict(zip(KINDS, right, strict=True)), kind)
                grade.fail(f"{where}: {cause}expected the {kind} groups {lists}, got {short(str(got), 300)}")


def _name(got: Any, right: Lists, every: dict[str, Lists], kind: str) -> str:
    """The mistake that gives this."""
    if isinstance(got, str):
        return "a group is a list of whole numbers; "
    if sorted(map(sorted, got)) == sorted(right):
        if sorted(got) == sorted(right):
            return "the groups are right; sort them by their first rank; "
        return "sort the ranks of a group in ascending order; "
    other = next((name for name, lists in every.items() if name != kind and got == lists), "")
    if other:
        return f"these are the {other} groups: which axis is it, and which one is the fastest? "
    ranks = sorted(rank for group in right for rank in group)
    if sorted(rank for group in got for rank in group) != ranks:
        return f"every rank from 0 to {ranks[-1]} is in one group of each kind; "
    if sorted(map(len, got)) != sorted(map(len, right)):
        return f"a group has as many ranks as its axis is long, {len(right[0])}; "
    return "the ranks of a group differ along one axis only, and the tensor axis is the fastest; "


def check_groups(grade: Grade) -> None:
    """All ranks call new_group in one order, and each gets the three groups that it is in."""
    for sizes in MADE:
        n = int(np.prod(sizes))
        numbers = [_numbers(grade, sizes, rank) for rank in range(n)]
        probe, grid = "grader.probes.beyond.stages:groups", dict(zip(KINDS, sizes, strict=True))
        result = grade.run(probe, n, payloads=True, each=numbers, grid=grid)
        where = f"make_groups of a grid with {words(sizes)}"
        verdict = grade.verdict(result)
        differ = _differ(result)
        if verdict:
            raise type(verdict)(f"{where}: {differ}{verdict}")
        if differ:
            grade.fail(f"{where}: {differ}")
        for rank, told in enumerate(result.values):
            for kind, lists in zip(KINDS, GRIDS[sizes], strict=True):
                right = next(group for group in lists if rank in group)
                check_sums(grade, result.ranks[rank], kind, right, f"{where}, rank {rank}")
                _check_group(grade, told[kind], kind, right, numbers, f"{where}, rank {rank}")


def _numbers(grade: Grade, sizes: Sizes, rank: int) -> dict[str, np.ndarray]:
    """A number of each rank for each kind of group."""
    draw = drawn.generator(grade.seed, 61, *sizes, rank)
    return {kind: draw.normal(size=3) for kind in KINDS}


def _check_group(grade: Grade, told: Fields, kind: str, right: list[int], numbers: Sequence[dict], where: str) -> None:
    if "type" in told:
        reason = "new_group returns no group where the rank is not a member: keep its result only on members, and make "
        reason += "groups of one rank, too"
        grade.fail(f"{where}: expected a process group as `{kind}`, got {told['type']}; {reason}")
    if told["ranks"] != right:
        grade.fail(f"{where}: expected the {kind} group of the ranks {right}, got that of {told['ranks']}")
    total = np.sum([numbers[rank][kind] for rank in right], axis=0)
    if not np.allclose(told["sum"], total):
        grade.fail(f"{where}: a sum over the {kind} group is not that of the ranks {right}")


def check_sums(grade: Grade, rank: RankResult, kind: str, right: list[int], where: str) -> None:
    """The sum over a returned group reached the members of this group, as the broker has seen."""
    names = [event.data.get("of", "") for event in rank.events if event.name == "sum"]
    if kind not in names:
        return  # no group was returned: judged by what came back
    begin = next(i for i, event in enumerate(rank.events) if event.name == "sum" and event.data.get("of") == kind)
    call = next((event for event in rank.events[begin:] if isinstance(event, Call)), None)
    if call is None or call.name != "all_reduce" or sorted(call.members) != right:
        got = f"{call.name} of the ranks {sorted(call.members)}" if call else "no message"
        grade.fail(f"{where}: a sum over the {kind} group: expected an all_reduce of the ranks {right}, got {got}")


def created(result: Result) -> list[list[Any]]:
    """The ranks that each rank has called new_group for, call by call."""
    return [[event.data.get("ranks") for event in rank.events if event.name == "new_group"] for rank in result.ranks]


def _differ(result: Result) -> str:
    """Where two ranks call new_group for different groups; "" if all ranks make the same calls."""
    calls = created(result)
    for rank, mine in enumerate(calls):
        for place, (one, other) in enumerate(zip_longest(calls[0], mine, fillvalue="nothing more")):
            if one != other and result.ranks[rank].outcome != "raised":
                same = sorted(map(str, mine)) == sorted(map(str, calls[0]))
                cause = "in the same order" if same else "members or not"
                return (
                    f"in call {place + 1} of new_group, rank 0 makes the group {short(str(one), 60)}, but rank {rank} "
                    f"makes {short(str(other), 60)}: all ranks must call new_group for all groups, {cause}\n"
                )
    return ""
