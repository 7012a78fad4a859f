"""Judges the cost model: literal cases, each in other units of time and size.

The lesson's formulas are not here. The seconds of rings and steps agree with those of the benchmark's simulation, which
moves each bucket as an event (tests/own/test_predict_simulator.py). In each run, all times of a case are multiplied by
one drawn number, and all sizes by another one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grader.grading import Grade

FILE = "beyond/cost_model.py"
Average = tuple[float, int, float, float]  # bytes, workers, latency in seconds, bytes per second
Step = tuple[float, float, float, Sequence[tuple[float, float]]]  # forward, backward, optimizer, (ready, communication)

# Seconds of each case, and wrong ones with the mistakes that give them.
RING: Mapping[Average, tuple[float, Mapping[float, str]]] = {
    (1200, 3, 0.5, 100): (
        18,
        {
            16.5: "the latency is paid once per message, not once",
            16: "the latency is missing",
            9: "every piece travels around the ring twice, once to be summed and once to be distributed",
            50: "each message has all bytes; expected a piece of them",
            27: "there are 2(N-1) rounds, not 2N",
            54: "that is the sum over all workers; they send at the same time",
            36: "that is sent plus received; they happen at the same time",
            130: "those are bits; the bandwidth is in bytes",
            21: "that is gather and scatter, or all pieces over the link of one worker",
        },
    ),
    (800, 4, 0, 100): (12, {14: "a factor of N/(N-1) too much", 16: "there are 2(N-1) rounds, not 2N"}),
    (800, 4, 1, 1e12): (6, {1: "the latency is paid once per message, not once", 8: "there are 2(N-1) rounds, not 2N"}),
    (1000, 8, 0.25, 50): (38.5, {}),
    (10, 907, 0, 1): (18120 / 907, {}),  # pieces of no whole bytes: 907 is prime, and larger than the drawn factor
    (700, 7, 2, 10): (144, {}),
    (500, 2, 1, 50): (12, {}),
    (900, 1, 0.5, 100): (0, {}),
}
STAR: Mapping[Average, tuple[float, Mapping[float, str]]] = {
    (300, 4, 0.5, 100): (
        19,
        {
            9.5: "that is one direction only: rank 0 gathers, then scatters",
            18.5: "the gather has a latency, and so has the scatter",
            25: "rank 0's own gradients are not sent",
            7: "the bytes do not travel at the same time: all of them pass through the link of rank 0",
            21: "messages of different workers start together: their latencies overlap, and only their bytes queue",
            18: "the latency is missing",
            7.5: "that is a ring",
        },
    ),
    (500, 2, 1, 50): (22, {11: "that is one direction only: rank 0 gathers, then scatters"}),
    (90, 8, 0.25, 10): (126.5, {}),
    (640, 5, 0, 64): (80, {}),
    (300, 1, 0.5, 100): (0, {1: "with one worker nothing is sent"}),
}
# (total, exposed, hidden)
STEPS: Sequence[tuple[str, Step, tuple[float, float, float]]] = (
    ("buckets that never meet", (1, 4, 0.5, ((2, 1), (3, 1), (4, 1))), (6.5, 1, 2)),
    ("a bucket that waits for the one before it", (1, 4, 0.5, ((1, 3), (2, 2), (4, 0.5))), (8, 2.5, 3)),
    ("a network that is idle between two buckets", (0.5, 6, 0.25, ((1, 0.5), (5, 2))), (7.75, 1, 1.5)),
    ("a bucket that is complete before the one whose turn it is", (1, 5, 1, ((4, 1), (1, 2), (5, 1))), (10, 3, 1)),
    ("one bucket that is ready at the end of backward", (2, 3, 1, ((3, 4),)), (10, 4, 0)),
    ("buckets that have all arrived before the end of backward", (1, 4, 0.5, ((1, 1), (2, 1))), (5.5, 0, 2)),
    ("no bucket", (1, 4, 0.5, ()), (5.5, 0, 0)),
    ("a network that never rests", (0, 4, 0, ((0.5, 2), (1, 2), (2, 2), (4, 2))), (8.5, 4.5, 3.5)),
)


def check_ring(grade: Grade) -> None:
    """ring_all_reduce_seconds in every case."""
    _check_averages(grade, "ring_all_reduce_seconds", RING)
    grade.imports_only_allowed(FILE)


def check_star(grade: Grade) -> None:
    """gather_scatter_seconds in every case."""
    _check_averages(grade, "gather_scatter_seconds", STAR)


def _check_averages(grade: Grade, function: str, known: Mapping[Average, tuple[float, Mapping[float, str]]]) -> None:
    longer, larger = _units(grade)
    cases = [[size * larger, n, latency * longer, rate * larger / longer] for size, n, latency, rate in known]
    found = grade.values("grader.probes.beyond.cost_model:averages", 1, file=FILE, function=function, cases=cases)[0]
    for case, (seconds, causes), got in zip(cases, known.values(), found, strict=True):
        if isinstance(got, str):
            grade.fail(f"{function} returned {got} with workers={case[1]}; expected seconds")
        if not _same(got, seconds * longer):
            size, workers, latency, rate = case
            why = next((f": {words}" for value, words in causes.items() if _same(got, value * longer)), "")
            what = f"{function} of {size:g} bytes on {workers} workers, latency {latency:g} s, {rate:g} bytes/s"
            grade.fail(f"{what}: expected {seconds * longer:.6g} s, got {got:.6g} s{why}")


def check_exposed(grade: Grade) -> None:
    """What the step waits for, in every case."""
    for what, (_, exposed, _), (_, got, _), unit in _steps(grade):
        if not _same(got, exposed):
            why = ": exposed time is never negative" if got < 0 else ""
            grade.fail(f"step_time with {what}: expected {exposed / unit:g} s exposed, got {got / unit:.4g} s{why}")


def check_parts(grade: Grade) -> None:
    """The whole step, and what is hidden."""
    for what, (total, _, hidden), (got, _, got_hidden), unit in _steps(grade):
        for name, expected, mine in (("in all", total, got), ("hidden", hidden, got_hidden)):
            if not _same(mine, expected):
                grade.fail(f"step_time with {what}: expected {expected / unit:g} s {name}, got {mine / unit:.4g} s")


def _steps(grade: Grade) -> list[tuple[str, tuple, list[float], float]]:
    """(what, right times, the student's times, unit) of every case; messages say times without the drawn unit."""
    unit, _ = _units(grade)
    cases: list[Any] = []
    for _, (forward, backward, optimizer, buckets), _ in STEPS:
        pairs = [[ready * unit, communication * unit] for ready, communication in buckets]
        cases.append([forward * unit, backward * unit, optimizer * unit, pairs])
    found = grade.values("grader.probes.beyond.cost_model:steps", 1, file=FILE, cases=cases)[0]
    for (what, *_), step in zip(STEPS, found, strict=True):
        if other := step.get("other"):
            grade.fail(f"step_time with {what} returned {other}; expected StepTime(total, exposed, hidden)")
        if wrong := [time for time in step["times"] if isinstance(time, str)]:
            grade.fail(f"step_time with {what} returned {wrong[0]} for a time; expected seconds")
    if not all(step["kept"] for step in found):
        grade.fail("step_time changed the list of buckets: it belongs to the caller")
    return [
        (f"{what} {_drawing(case)}", tuple(time * unit for time in right), step["times"], unit)
        for (what, case, right), step in zip(STEPS, found, strict=True)
    ]


def _drawing(case: Step) -> str:
    """The case in short: (backward 4 s; ready at 2, 3, takes 1, 1)."""
    _, backward, _, buckets = case
    ready, takes = (", ".join(f"{pair[side]:g}" for pair in buckets) or "-" for side in (0, 1))
    return f"(backward {backward:g} s; ready at {ready} s, taking {takes} s)"


def _units(grade: Grade) -> tuple[float, float]:
    """Factors for times and for sizes."""
    return float(grade.draw.uniform(0.1, 9.0)), float(grade.draw.integers(2, 900))


def _same(got: float, expected: float) -> bool:
    return math.isfinite(got) and math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
