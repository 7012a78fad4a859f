"""Judges Pipe.forward called alone: micro-batches, calls of compute, output."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from grader.checks.pipeline import schedule
from grader.checks.pipeline.waits import run_once
from grader.grading import Grade
from grader.ranks.forward_referee import ForwardReferee, change_shape
from grader.ranks.phrases import short
from grader.wire.values import Fields


@dataclass(frozen=True)
class PipeSetting:
    """Batches that one pipe is called with in turn. `shape`: what the last partition makes of its result."""

    split_size: int
    partitions: int
    sizes: tuple[int, ...]
    features: tuple[int, ...] = (3,)
    dtype: str = "float64"
    shape: str = "same"


# Even, with a rest, larger than the batch, small before large, one partition and one micro-batch.
SETTINGS = (
    PipeSetting(2, 2, (8,)),
    PipeSetting(3, 3, (7, 6)),
    PipeSetting(8, 2, (5,)),
    PipeSetting(4, 2, (3, 9)),
    PipeSetting(1, 1, (3,)),
    PipeSetting(5, 1, (1, 2)),
)
# Outputs of other shapes than their inputs: no second dimension at all, one more, and from whole numbers.
SHAPES = (
    PipeSetting(2, 2, (4, 5), shape="flat"),
    PipeSetting(3, 2, (6,), features=(3, 2), shape="deep"),
    PipeSetting(2, 3, (6,), features=(2, 2)),
    PipeSetting(2, 2, (5,), dtype="int64", shape="flat"),
)


@dataclass
class Call:
    """One call of forward, and what was seen. `first`: it is the first of its pipe."""

    setting: PipeSetting
    batch: np.ndarray
    seen: Fields
    first: bool
    factors: np.ndarray  # (micro-batches, partitions): what compute makes of a micro-batch in a partition
    shifts: np.ndarray

    @property
    def words(self) -> str:
        return f"a batch of shape {self.batch.shape} with split_size={self.setting.split_size}"


def split_sizes(batch: int, split_size: int) -> list[int]:
    """The sizes of the micro-batches."""
    return [min(split_size, batch - start) for start in range(0, batch, split_size)]


def numbered(draw: np.random.Generator, size: int, features: tuple[int, ...] = (3,)) -> np.ndarray:
    """(B, *features): each example begins with its number."""
    batch = draw.normal(size=(size, *features))
    batch.reshape(size, -1)[:, 0] = np.arange(size)
    return batch


def forwards(grade: Grade, settings: tuple[PipeSetting, ...] = SETTINGS, last: str = "cpu") -> Iterator[Call]:
    """Every call of every setting; see probes.pipeline.forward. All tests of p.3 look at the same runs."""
    draw = np.random.default_rng(grade.seed)
    for setting in settings:
        batches = [numbered(draw, size, setting.features) for size in setting.sizes]
        if setting.dtype == "int64":
            batches = [np.round(10 * batch).astype(np.int64) for batch in batches]
        shape = (max(setting.sizes), setting.partitions)
        factors, shifts = draw.integers(2, 6, size=shape), draw.integers(-9, 10, size=shape)
        result = run_once(
            grade, "grader.probes.pipeline.forward:forward", stages=setting.partitions, split_size=setting.split_size,
            each=[batches], last=last, shape=setting.shape, sizes=setting.sizes, features=setting.features,
            dtype=setting.dtype, referee=ForwardReferee(factors, shifts, setting.partitions, setting.shape),
        )  # fmt: skip
        grade.must_return(result)
        told = zip(batches, result.values[0], result.referee.seen, strict=True)
        for number, (batch, call, seen) in enumerate(told):
            yield Call(setting, batch, call | vars(seen), number == 0, factors, shifts)


def check_sizes(grade: Grade) -> None:
    """split_size is the number of examples in a micro-batch; the last may be smaller, and no example is lost."""
    for call in forwards(grade):
        size, split_size = len(call.batch), call.setting.split_size
        expected = split_sizes(size, split_size)
        if not call.seen["calls"]:
            grade.fail(f"{call.words}: self.compute was never called: the partitions get their work from it")
        got = call.seen["calls"][0]["sizes"]
        if got == expected:
            _check_rows(grade, call)
            continue
        if got == split_sizes(size, -(-size // len(expected))):
            cause = (
                "the micro-batches have equal sizes, as chunk() makes them; each but the last has split_size examples"
            )
            if not call.first:
                cause += "; or do you reuse a value from an earlier, smaller batch?"
        elif not call.first and 0 < max(got, default=0) < min(split_size, size):
            cause = (
                "the micro-batches are smaller than split_size: do you reuse a value from an earlier, smaller batch?"
            )
        elif got == split_sizes(size, -(-size // split_size)):
            cause = "split_size is the number of examples in a micro-batch, not the number of micro-batches"
        elif sum(got) < size:
            cause = f"{size - sum(got)} examples are in no micro-batch"
        else:
            cause = "every micro-batch but the last has split_size examples"
        grade.fail(f"{cause}: {call.words}: expected micro-batches of {expected} examples, got {short(got)}")


def _check_rows(grade: Grade, call: Call) -> None:
    """The micro-batches hold the examples of the batch, in their order."""
    starts = range(0, len(call.batch), call.setting.split_size)
    for number, (start, got) in enumerate(zip(starts, call.seen["calls"][0]["given"], strict=True)):
        right = call.batch[start : start + call.setting.split_size]
        if got is None or got.shape != right.shape or not np.array_equal(got, right):
            grade.fail(f"{call.words}: micro-batch {number} does not hold the batch's examples from {start} on, in "
                       "their order: split x along dimension 0")  # fmt: skip


def check_clocks(grade: Grade) -> None:
    """compute is called once for each clock cycle, with its pairs, in the order of the schedule."""
    for call in forwards(grade):
        n = call.setting.partitions
        m = len(split_sizes(len(call.batch), call.setting.split_size))
        given = [[[i, j] for i in range(m)] for j in range(n)]
        got = [one["pairs"] for one in call.seen["calls"]]
        setting, asked = f"{m} micro-batches on {n} partitions", call.seen["asked"]
        if any(one["nested"] for one in call.seen["calls"]):
            grade.fail(
                f"{setting}: compute got a list of clock cycles, expected the pairs of one: call it once for each "
                "clock cycle, not once with the whole schedule"
            )
        if not asked:
            _own_schedule(grade, m, n, got)
            continue
        if asked[0] != [m, n]:
            swapped = ": the arguments are swapped" if asked[0] == [n, m] else ""
            grade.fail(
                f"{setting}: _clock_cycles was called with {short(asked[0][0])} micro-batches and {short(asked[0][1])} "
                f"partitions{swapped}"
            )
        if [sorted(pairs) for pairs in got] != given:
            grade.fail(f"{setting}: {_wrong_calls(got, given)}")


def _own_schedule(grade: Grade, m: int, n: int, got: list) -> None:
    """A forward that does not ask _clock_cycles: any schedule will do that keeps its rules."""
    cycles = [[(i, j) for i, j in pairs] for pairs in got]
    for rule in (
        schedule.once,
        schedule.in_order,
        schedule.one_at_a_time,
        schedule.as_short_as_can_be,
    ):
        words, cells = rule(m, n, cycles)
        if words:
            schedule.fail(grade, (m, n), f"_clock_cycles was not called, and {words}", cycles, cells)


def _wrong_calls(got: list, given: list) -> str:
    flat, wanted = ([pair for pairs in calls for pair in pairs] for calls in (got, given))
    if len(got) == 1 < len(given) and sorted(flat) == sorted(wanted):
        return "compute was called once with the whole schedule, expected one call for each clock cycle"
    if len(got) == len(wanted) > len(given):
        return (
            f"compute was called {len(got)} times with one pair each: pass it all pairs of a clock cycle at "
            "once; otherwise only one partition runs at a time"
        )
    if sorted(flat) == sorted(wanted):
        return f"expected compute to be called with {given}, got {short(got)}: one call per clock cycle, in their order"
    missing = [tuple(pair) for pair in wanted if pair not in flat]
    return f"expected one call of compute for each of {len(given)} clock cycles, got {len(got)}; missing: {missing[:3]}"


def expected_output(call: Call) -> np.ndarray:
    """Each micro-batch goes through all partitions; the last one changes the shape as well."""
    expected, micro_batches = call.batch, np.arange(len(call.batch)) // call.setting.split_size
    for j in range(call.setting.partitions):
        shape = (-1, *(1 for _ in call.setting.features))
        factor, shift = (numbers[micro_batches, j].reshape(shape) for numbers in (call.factors, call.shifts))
        expected = factor * expected + shift
    return change_shape(expected, call.setting.shape)


def check_output(grade: Grade) -> None:
    """The output has the micro-batches in their order, on the last device; the input is left alone."""
    for call in forwards(grade, SETTINGS + SHAPES):
        expected, got = expected_output(call), call.seen["output"]
        if got is None:
            grade.fail("expected a tensor as the output of forward, got something else: concatenate the micro-batches")
        if got.shape != expected.shape:
            grade.fail(
                f"{call.words}: expected an output of shape {expected.shape}, got {got.shape}: concatenate "
                "the output micro-batches along dimension 0, whatever their shape"
            )
        if not np.allclose(got, expected):
            grade.fail(f"{call.words}: {_wrong_values(call, got, expected)}")
        if call.seen["changed"]:
            grade.fail("the caller's batch was changed: results replace micro-batches in the list, not in the input")
    if any(call.seen["moved"] for call in forwards(grade, SETTINGS + SHAPES, last="meta")):
        grade.fail("forward moves the output away from the last device: the result stays where it was computed")
    check_clocks(grade)  # the partitions one after the other, without a schedule, have the same output


def _wrong_values(call: Call, got: np.ndarray, expected: np.ndarray) -> str:
    rows, wanted = got.reshape(len(got), -1), expected.reshape(len(got), -1)
    first = int(np.argmax(~np.isclose(rows, wanted).all(axis=1)))
    cause = ""
    if np.allclose(np.sort(rows[:, 0]), np.sort(wanted[:, 0])):
        cause = ": the examples are in the wrong order"
    if got.shape == call.batch.shape and np.allclose(got, call.batch):
        cause = ": this is the input; return what compute has put into the list"
    elif got.dtype != expected.dtype and got.dtype.kind in "iu":
        cause = f": the output is {got.dtype}, but the partitions return {expected.dtype}"
    return f"example {first}: expected {_few(wanted[first])}, got {_few(rows[first])}{cause}"


def _few(row: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in row[:6]]
