"""Judges what a block sends: one all_reduce where a sum is needed, of the right tensor, and nothing else."""

import math
from collections.abc import Iterator

from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import RankResult

Phase = tuple[str, str]  # ("forward" or "backward", of what)
PHASES = ("forward", "backward")


def phases(rank: RankResult) -> Iterator[tuple[Phase, list[Call]]]:
    """What a rank called in each phase, in order; the time between "ended" and the next event is no phase."""
    phase: Phase | None = None
    calls: list[Call] = []
    for event in rank.events:
        if isinstance(event, Call):
            calls += [event] if phase and event.name != "barrier" else []
            continue
        if phase:
            yield phase, calls
        begins = event.name in PHASES or event.name.startswith("make")
        phase, calls = (event.name, str(event.data.get("of", ""))) if begins else None, []
    if phase:
        yield phase, calls


def check_calls(
    grade: Grade, calls: list[Call], sizes: list[int], group: tuple[int, ...], where: str, advice: str
) -> None:
    """One all_reduce for each size, a number of elements, and no other call; in a group of one, none is needed."""
    if len(group) == 1 and not calls:
        return
    told = ", ".join(f"{call.name} ({call.where})" for call in calls[:4]) or "no call"
    if len(calls) != len(sizes) or any(call.name != "all_reduce" for call in calls):
        wanted = f"{_number(len(sizes))} all_reduce" if sizes else "no call"
        grade.fail(f"{where}: expected {wanted}, got {told}: {advice}")
    for call, size in zip(calls, sizes, strict=True):
        at = f"{where}, {call.name} ({call.where})"
        if set(call.members) != set(group):
            grade.fail(
                f"{at}: expected the group of ranks {', '.join(map(str, group))}, got ranks "
                f"{', '.join(map(str, call.members))}: pass the group on, group=..."
            )
        if call.reduce != "SUM":
            grade.fail(f"{at}: expected a sum, got {call.reduce}")
        if math.prod(call.shape) != size:
            grade.fail(f"{at}: expected {size} numbers, got {math.prod(call.shape)}: {advice}")


def _number(count: int) -> str:
    return {1: "one", 2: "two", 4: "four"}.get(count, str(count))
