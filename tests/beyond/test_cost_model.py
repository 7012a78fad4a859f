"""The cost model: b.15 the time of a pattern of messages, b.16 the time of a step that overlaps its communication.

The cases are literal or drawn; in each run, all times are multiplied by one drawn number, and all sizes by another
one. The lesson's formulas are not here: the drawn cases are followed message by message, and tick by tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import Tolerance
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from tests.ring_messages import messages_of_each

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context

graded = pytest.mark.graded
FILE = "beyond/cost_model.py"
Average = tuple[float, int, float, float]  # bytes, workers, latency in seconds, bytes per second
Step = tuple[float, float, float, Sequence[tuple[float, float]]]  # forward, backward, optimizer, (ready, communication)

# For each case the right seconds, and wrong seconds with the mistake that gives them.
RING: Mapping[Average, tuple[float, Mapping[float, str]]] = {
    (1200, 3, 0.5, 100): (
        18,
        {
            16.5: "the latency is paid once per message, not once",
            16: "the latency is missing",
            16
            + 2
            / 3: "the latency is divided by the workers, too: every message pays all of it, only its bytes are a piece",
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
FOLLOW = (
    "follow the buckets one by one: each starts when it is ready and the one before has arrived; exposed is what "
    "remains of the last one after the end of backward"
)
EXPOSED: Mapping[str, Mapping[str, float]] = {  # the case -> a mistake, and the seconds exposed that it gives
    "buckets that never meet": {
        "the time of a bucket is added before the maximum: it starts at the later of ready and the end of the one "
        "before, and takes its time from there": 0,
    },
    "a bucket that waits for the one before it": {
        "the delays of several buckets are added up: exposed is the time from the end of backward to the end of the "
        "last bucket": 4.5,
    },
}


# --- what a rank does ---


def number(value: Any) -> float | str:
    """Return a value as a float; its text if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)[:80]


@in_rank(uses=[number], join=False)
def averages(context: Context, lesson: ModuleType, inputs: list[list[float]]) -> object:
    """Yield the seconds of one way to average in each case."""
    for size, workers, latency, bandwidth in inputs:
        function = getattr(lesson, context.arguments["calls"])
        yield number(function(size, workers, lesson.Link(latency, bandwidth)))


@in_rank(uses=[number], join=False)
def steps(context: Context, lesson: ModuleType, inputs: Any) -> object:
    """Yield the times of a step in each case, and whether the list of buckets is unchanged."""
    for forward, backward, optimizer, pairs in inputs:
        buckets = [lesson.TimedBucket(ready, communication) for ready, communication in pairs]
        given = list(buckets)
        step = lesson.step_time(forward, backward, optimizer, buckets)
        parts = {name: number(getattr(step, name, step)) for name in ("total", "exposed", "hidden")}
        yield parts | {"step": repr(step)[:80], "kept": buckets == given}


# --- what is right ---


def units(grade: Grade) -> tuple[float, float]:
    """Draw factors for times and for sizes."""
    return float(grade.draw.uniform(0.1, 9.0)), float(grade.draw.integers(2, 900))


def seconds(
    value: float, unit: float, name: str, mistakes: Mapping[str, float] | None = None, message: str = ""
) -> Expected:
    wrong = {words: np.asarray(other * unit) for words, other in (mistakes or {}).items()}
    tolerance = Tolerance(limit=1e-6 * value * unit + 1e-9)
    return Expected(np.asarray(value * unit), message, f"seconds {name}", mistakes=wrong, tolerance=tolerance)


def draw_averages(grade: Grade, of_a_ring: bool) -> dict[Average, tuple[float, Mapping[float, str]]]:
    """Draw cases, and send their messages one by one."""
    known = dict[Average, tuple[float, Mapping[float, str]]]()
    for workers in grade.draw.choice(np.arange(10, 200), 3, replace=False).tolist():
        piece, latency, rate = (int(number) for number in grade.draw.integers(2, 50, 3))
        size, seconds = piece * workers, 0.0
        if of_a_ring:
            seconds = sum(latency + piece / rate for _ in range(messages_of_each(workers)[0]))
        for _ in () if of_a_ring else ("gather", "scatter"):
            seconds += latency
            for _other in range(1, workers):
                seconds += size / rate
        known[size, workers, latency, rate] = seconds, {}
    return known


def draw_steps(grade: Grade) -> list[tuple[str, Step, tuple[float, float, float]]]:
    """Draw steps in whole seconds, and follow the network second by second."""
    cases = list[tuple[str, Step, tuple[float, float, float]]]()
    for _ in range(4):
        forward, backward, optimizer = (int(number) for number in grade.draw.integers(1, 40, 3))
        count = int(grade.draw.integers(2, 7))
        ready, takes = grade.draw.integers(0, backward + 1, count), grade.draw.integers(1, 20, count)
        buckets = sorted(zip(ready.tolist(), takes.tolist(), strict=True))
        now, exposed, hidden, queue = 0, 0, 0, [number for number, (_, long) in enumerate(buckets) for _ in range(long)]
        while queue:
            if buckets[queue[0]][0] <= now:
                queue.pop(0)
                exposed, hidden = exposed + (now >= backward), hidden + (now < backward)
            now += 1
        times = forward + backward + exposed + optimizer, exposed, hidden
        cases.append((f"{count} drawn buckets", (forward, backward, optimizer, buckets), times))
    return cases


def check_averages(grade: Grade, calls: str, known: Mapping[Average, tuple[float, Mapping[float, str]]]) -> None:
    """Check one function in every case."""
    known = {**known, **draw_averages(grade, known is RING)}
    longer, larger = units(grade)
    cases = [[size * larger, n, latency * longer, rate * larger / longer] for size, n, latency, rate in known]
    (values,) = run(grade, averages, [cases], calls=calls).values
    for (size, workers, latency, rate), (right, causes), got in zip(cases, known.values(), values, strict=True):
        if isinstance(got, str):
            grade.fail(observed=f"{calls} returned {got} with workers={workers}; expected seconds")
        where = f"{calls} of {size:g} bytes on {workers} workers, latency {latency:g} s, {rate:g} bytes/s: "
        mistakes = {words: value for value, words in causes.items()}
        check(grade, where, {"time": got}, {"time": seconds(right, longer, "in all", mistakes)})


def check_steps(grade: Grade, names: Sequence[str]) -> None:
    """Check these times of step_time in every case."""
    unit, _ = units(grade)
    cases: list[list[object]] = []
    every_step = [*STEPS, *draw_steps(grade)]
    for _, (forward, backward, optimizer, buckets), _ in every_step:
        pairs = [[ready * unit, communication * unit] for ready, communication in buckets]
        cases.append([forward * unit, backward * unit, optimizer * unit, pairs])
    (values,) = run(grade, steps, [cases]).values
    labels = {"total": "in all", "exposed": "exposed", "hidden": "hidden"}
    for (what, (_, backward, _, buckets), right), got in zip(every_step, values, strict=True):
        ready, takes = (", ".join(f"{pair[side]:g}" for pair in buckets) or "-" for side in (0, 1))
        where = f"step_time with {what} (backward {backward:g} s; ready at {ready} s, taking {takes} s)"
        if any(isinstance(got[name], str) for name in labels):
            grade.fail(observed=f"{where} returned {got['step']}; expected StepTime(total, exposed, hidden)")
        if not got["kept"]:
            grade.fail("step_time changed the list of buckets: it belongs to the caller")
        if got["exposed"] < 0:
            exposed = f"seconds exposed: expected 0 or more, got {got['exposed'] / unit:.4g}"
            grade.fail(f"{where}: {exposed}: exposed time is never negative")
        in_units = {name: got[name] / unit for name in names}
        exposed_is_right = np.isclose(got["exposed"] / unit, right[1], rtol=1e-7, atol=1e-9)
        advice = "the exposed time is right, so compare with steps [3] and [4] of b.16" if exposed_is_right else FOLLOW
        expected: dict[str, Expected] = {}
        for name, value in zip(labels, right, strict=True):
            sign = -1 if name == "hidden" else 1
            wrong = {cause: value + sign * (other - right[1]) for cause, other in EXPOSED.get(what, {}).items()}
            expected[name] = seconds(value, 1.0, labels[name], wrong, f"{what}: {advice}")
        check(grade, f"{where}: ", in_units, {name: expected[name] for name in names})


# --- the graded tests ---


@graded("b.15")
def test_a_ring_takes_its_messages_one_after_another(grade: Grade) -> None:
    check_averages(grade, "ring_all_reduce_seconds", RING)
    grade.imports_only_allowed(FILE)


@graded("b.15")
def test_gather_and_scatter_pass_through_the_link_of_rank_0(grade: Grade) -> None:
    check_averages(grade, "gather_scatter_seconds", STAR)


@graded("b.16")
def test_a_bucket_waits_until_it_is_ready_and_the_one_before_has_arrived(grade: Grade) -> None:
    check_steps(grade, ["exposed"])


@graded("b.16")
def test_a_step_takes_what_it_computes_and_what_is_not_hidden(grade: Grade) -> None:
    check_steps(grade, ["total", "hidden"])
