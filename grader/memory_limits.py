"""Judges how much memory ranks have. The process that starts them measures it: nothing that a rank says counts.

The memory of a rank is what it has taken since the point "start", at which the student's file is not loaded yet. Its
code, torch's optimizer and the like take less than OVERHEAD.
"""

from collections.abc import Callable
from dataclasses import dataclass

from grader.grading import Grade
from grader.ranks.outcome import Result

MEASURED_DEADLINE = 40.0  # seconds; all ranks meet at every point, which takes long on a busy machine
OVERHEAD = 1_000_000  # bytes; 0.5 to 0.8 MB were measured


@dataclass(frozen=True)
class Limit:
    """At a point, `parts` (name -> bytes) may be in memory. `advice` is what to do if there is more."""

    point: str
    when: str
    parts: dict[str, int]
    advice: str


def check(grade: Grade, run: Callable[[int], Result], limits: list[Limit], spare: int) -> None:
    """Fail at the first point where a rank has more than the limit and `spare`.

    run(attempt) makes the run. If a rank has too much, a second run decides: on a busy system, a rank may look larger
    for a moment, but what a program keeps is there every time. Where the system shows no memory, nothing is judged.
    """
    advice = excess = ""
    for attempt in range(2):
        result = run(attempt)
        grade.must_return(result)
        check_reached(grade, result, limits)
        advice, excess = too_much(result, limits, spare)
        if not excess:
            return
    grade.fail(advice, excess)


def too_much(result: Result, limits: list[Limit], spare: int) -> tuple[str, str]:
    """Return what to do where a rank has more than it may have, and how much it has; "" if none has."""
    for limit in limits:
        allowed = sum(limit.parts.values())
        for rank, taken in enumerate(result.memory.get(limit.point, [])):
            taken -= result.memory["start"][rank]
            if taken > allowed + spare + OVERHEAD:
                parts = ", ".join(f"{name} {_mb(size)}" for name, size in limit.parts.items())
                observed = (
                    f"{limit.when}, rank {rank} has {_mb(taken)} in memory; expected about {_mb(allowed)} ({parts})"
                )
                return limit.advice, observed
    return "", ""


def check_reached(grade: Grade, result: Result, limits: list[Limit]) -> None:
    """Fail if a point was never reached: the probe measures wherever a block computes."""
    for limit in limits:
        if limit.point not in result.memory:
            grade.fail(observed=f"{limit.when}: the run never reached this point")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
