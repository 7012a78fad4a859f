"""Pipe.forward, p.3: called alone, with a schedule and a compute() of this file, which note their arguments.

What partitions make of their inputs is drawn. So the output's values show with which arguments compute was called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from grader.arithmetic import Tolerance
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank
from grader.wire.values import Fields
from tests.pipeline import pipe_shared
from tests.pipeline import test_schedule as schedule
from tests.pipeline.pipe_shared import IN_RANK, run_pipe, split_sizes

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, nn, torch

graded = pytest.mark.graded
CRASHES = pipe_shared.CRASHES


class ForwardSetting(NamedTuple):
    """Batches with which one pipe is called, one after the other. `shape`: of the last partition's result."""

    split_size: int
    partitions: int
    sizes: tuple[int, ...]
    features: tuple[int, ...] = (3,)
    dtype: str = "float64"
    shape: str = "same"


# Split sizes that divide evenly and that do not, larger than the batch, a small batch before a large one, one
# partition, one micro-batch.
SIMPLE = (ForwardSetting(2, 2, (8,)),)
SETTINGS = (
    ForwardSetting(3, 3, (7, 6)),
    ForwardSetting(8, 2, (5,)),
    ForwardSetting(4, 2, (3, 9)),
    ForwardSetting(1, 1, (3,)),
    ForwardSetting(5, 1, (1, 2)),
)
# Outputs of other shapes than their inputs: one dimension, one more than the input, and from whole numbers.
SHAPES = (
    ForwardSetting(2, 2, (4, 5), shape="flat"),
    ForwardSetting(3, 2, (6,), features=(3, 2), shape="deep"),
    ForwardSetting(2, 3, (6,), features=(2, 2)),
    ForwardSetting(2, 2, (5,), dtype="int64", shape="flat"),
)


# --- what a rank does ---


class StandIns:
    """Replace _clock_cycles and Pipe.compute, and note their arguments in `report`.

    Partition j makes factors[i, j] x + shifts[i, j] of micro-batch i; the last may change the shape.
    """

    def __init__(self, numbers: Fields, shape: str, last: str) -> None:
        self.factors, self.shifts, self.shape, self.last = numbers["factors"], numbers["shifts"], shape, last
        self.report: Fields = {"asked": [], "pairs": [], "nested": False, "given": []}

    def clock_cycles(self, num_batches: int, num_partitions: int) -> Iterator[list[tuple[int, int]]]:
        self.report["asked"].append([int(num_batches), int(num_partitions)])
        for partition in range(num_partitions):  # a legal order, which no pipeline uses
            yield [(micro_batch, partition) for micro_batch in range(num_batches)]

    def compute(self, batches: list[torch.Tensor], schedule: list[tuple[int, int]]) -> None:
        """Store the results of these pairs in `batches`."""
        items = [list(item) for item in schedule]
        nested = any(not item or isinstance(item[0], tuple | list) for item in items)
        flat: list[Any] = [pair for cycle in items for pair in cycle] if nested else items
        pairs = [[int(i), int(j)] for i, j in flat[:100]]
        self.report["nested"] |= nested
        self.report["pairs"] = [*self.report["pairs"], pairs][:200]
        self.report["given"] = self.report["given"] or [content(batch) for batch in batches[:100]]
        before = list(batches)
        m, n = self.factors.shape
        for i, j in pairs:
            if 0 <= i < min(m, len(before)) and 0 <= j < n and torch.is_tensor(before[i]):
                batches[i] = self.result(i, j, before[i])

    def result(self, i: int, j: int, x: torch.Tensor) -> torch.Tensor:
        made = self.factors[i, j] * x + self.shifts[i, j]
        if j < self.factors.shape[1] - 1:
            return made
        made = made.to(self.last)
        if self.shape == "same":
            return made
        made = made.double()
        return made.flatten(1).sum(dim=1) / 2 if self.shape == "flat" else torch.stack([made, -made], dim=-1)


def content(batch: object) -> torch.Tensor | None:
    """Return a micro-batch as it is sent; zeros for one on the device "meta", which has no content."""
    if not torch.is_tensor(batch):
        return None
    return torch.zeros(batch.shape, dtype=batch.dtype) if batch.is_meta else batch.detach()


@in_rank(uses=[IN_RANK, content, StandIns], preload=["steps"], join=False)
def forward(context: Context, lesson: Any, inputs: list[Fields]) -> object:
    """Yield what each call of forward did, for all batches of all `settings`: its output, the arguments of the
    stand-ins, whether the output left the device `last`, and whether the input changed."""
    last = context.arguments["last"]
    for setting, numbers in zip(context.arguments["settings"], inputs, strict=True):
        partitions, split_size = setting["partitions"], setting["split_size"]
        devices = [torch.device(name) for name in [*(f"cpu:{j}" for j in range(partitions - 1)), last]]
        lesson._split_module = lambda modules, devices=devices: (
            [nn.Sequential(nn.Identity()) for _ in devices],
            devices,
        )
        pipe = lesson.Pipe(nn.Sequential(*(nn.Identity() for _ in devices)), split_size)
        for x in numbers["batches"]:
            context.during = f"calling forward with a batch of shape {tuple(x.shape)}, split_size={split_size}"
            stand_ins, own = StandIns(numbers, setting["shape"], last), x.clone()
            lesson._clock_cycles, pipe.compute = stand_ins.clock_cycles, stand_ins.compute
            try:
                output = pipe.forward(own)
            except NotImplementedError as error:
                if "meta" not in str(error):
                    raise
                yield {"output": None, "moved": True, "changed": False}  # what is on "meta" cannot be copied from it
                continue
            changed = not torch.equal(own, x)
            yield stand_ins.report | {"output": content(output), "moved": False, "changed": changed}


# --- what is judged ---


class ForwardCall(NamedTuple):
    """One call of forward. `got`: what the rank returned, and the arguments of the stand-ins."""

    setting: ForwardSetting
    batch: np.ndarray
    parts: list[np.ndarray]  # its micro-batches
    outputs: list[np.ndarray]  # what the partitions make of them
    got: Fields

    @property
    def where(self) -> str:
        return f"a batch of shape {self.batch.shape} with split_size={self.setting.split_size}: "


def calls(grade: Grade, *groups: Sequence[ForwardSetting]) -> Iterator[ForwardCall]:
    """Yield every call of every setting. A group of settings is one run, which leaves nothing to judge if one crashes:
    so the simple setting comes first, alone."""
    for settings in (SIMPLE, *groups):
        yield from calls_of(grade, settings)


def calls_of(grade: Grade, settings: Sequence[ForwardSetting], last: str = "cpu") -> Iterator[ForwardCall]:
    draw, inputs = np.random.default_rng([grade.seed, len(settings)]), list[Fields]()
    for setting in settings:
        batches = [draw.normal(size=(size, *setting.features)) for size in setting.sizes]
        for number, batch in enumerate(batches):
            batch.reshape(len(batch), -1)[:, 0] = np.arange(len(batch))  # each example begins with its number
            batches[number] = np.round(10 * batch).astype(np.int64) if setting.dtype == "int64" else batch
        shape = (max(setting.sizes), setting.partitions)
        factors, shifts = draw.integers(2, 6, size=shape), draw.integers(-9, 10, size=shape)
        inputs.append({"batches": batches, "factors": factors, "shifts": shifts})
    in_rank_settings = [setting._asdict() for setting in settings]
    result = run_pipe(grade, forward, [inputs], settings=in_rank_settings, last=last)
    grade.must_return(result)
    all_got = iter(result.values[0])
    for setting, numbers in zip(settings, inputs, strict=True):
        for batch in numbers["batches"]:
            parts = np.split(batch, np.cumsum(split_sizes(len(batch), setting.split_size))[:-1])
            outputs: list[np.ndarray] = parts
            for j in range(setting.partitions):
                outputs = [numbers["factors"][i, j] * x + numbers["shifts"][i, j] for i, x in enumerate(outputs)]
            yield ForwardCall(setting, batch, parts, [reshaped(x, setting.shape) for x in outputs], next(all_got))


def reshaped(made: np.ndarray, shape: str) -> np.ndarray:
    """Return a result of the last partition in its shape, see ForwardSetting."""
    if shape == "same":
        return made
    made = made.astype(np.float64)
    return made.reshape(len(made), -1).sum(axis=1) / 2 if shape == "flat" else np.stack([made, -made], axis=-1)


def check_sizes(grade: Grade) -> None:
    """Check that a micro-batch has split_size examples, the last one may have fewer, and no example is lost."""
    for call in calls(grade, SETTINGS):
        size, split_size, given = len(call.batch), call.setting.split_size, call.got["given"]
        got: Fields = {"called": bool(call.got["pairs"]), "sizes": [0 if x is None else len(x) for x in given]}
        got |= {f"micro-batch {i}": x for i, x in enumerate(given)}
        causes = {
            "the micro-batches are smaller than split_size: do you reuse a value from an earlier, smaller batch?":
                min(split_size, *call.setting.sizes),
            "split_size is the number of examples in a micro-batch, not the number of micro-batches":
                math.ceil(size / split_size),
        }  # fmt: skip
        sizes, lost = "expected micro-batches of {expected} examples, got {got}", size - sum(got["sizes"])
        rule = "every micro-batch but the last has split_size examples"
        message = f"{lost} examples are in no micro-batch" if lost > 0 else rule
        mistakes = {f"{cause}: {sizes}": split_sizes(size, wrong) for cause, wrong in causes.items()}
        order = "it does not hold the batch's examples in their order: split x along dimension 0"
        expected = {
            "called": Expected(True, "self.compute was never called: the partitions get their work from it"),
            "sizes": Expected([len(x) for x in call.parts], f"{message}: {sizes}", mistakes=mistakes),
            **{f"micro-batch {i}": Expected(x, order) for i, x in enumerate(call.parts)},
        }
        check(grade, call.where, got, expected)


def check_cycles(grade: Grade) -> None:
    """Check that compute is called once for each clock cycle, with its pairs, in the order of the schedule."""
    whole = "compute got a list of clock cycles, expected the pairs of one: call it once for each clock cycle, not once"
    for call in calls(grade, SETTINGS):
        m, n, called, asked = len(call.parts), call.setting.partitions, call.got["pairs"], call.got["asked"]
        where = f"{m} micro-batches on {n} partitions: "
        check(grade, where, call.got, {"nested": Expected(False, f"{whole} with the whole schedule")})
        if not asked:  # it has a schedule of its own: any that keeps the rules will do
            schedule.check_rules(grade, (m, n), [[(i, j) for i, j in pairs] for pairs in called])
            continue
        cycles = [[[i, j] for i in range(m)] for j in range(n)]
        flat, wanted = (sorted(pair for pairs in each for pair in pairs) for each in (called, cycles))
        message = f"expected compute to be called with {cycles}, got {{got}}: one call per clock cycle, in their order"
        if missing := [tuple(pair) for pair in wanted if pair not in flat]:
            message = f"expected one call of compute for each of {n} clock cycles, got {len(called)}"
            message = f"{message}; missing: {missing[:3]}"
        each = f"compute was called {len(called)} times with one pair each: pass it all pairs of a clock cycle at once"
        mistakes = {
            "compute was called once with the whole schedule, expected one call for each clock cycle": [wanted],
            f"{each}; otherwise only one partition runs at a time": [[pair] for cycle in cycles for pair in cycle],
        }
        sizes = "_clock_cycles was called with {} micro-batches and {} partitions".format(*asked[0])
        expected = {
            "asked": Expected(
                [m, n],
                f"{sizes}; expected {m} and {n}: count the micro-batches that the batch was split into, with a "
                "shorter last one",
                mistakes={f"{sizes}: the arguments are swapped": [n, m]},
            ),
            "pairs": Expected(cycles, message, mistakes=mistakes),
        }
        check(grade, where, {"asked": asked[0], "pairs": [sorted(pairs) for pairs in called]}, expected)


def check_output(grade: Grade) -> None:
    """Check that the output has the micro-batches in order, on the last device, and that the input is unchanged."""
    whole = "concatenate the output micro-batches along dimension 0, whatever their shape"
    for call in calls(grade, SETTINGS, SHAPES):
        value, right, x = call.got["output"], np.concatenate(call.outputs), call.batch
        mistakes = {
            "this is the input; return what compute has put into the list": x,
            "the examples are in the wrong order": np.concatenate(call.outputs[::-1]),
            f"the output is {x.dtype}, but the partitions return {right.dtype}": right.astype(x.dtype),
        }
        close = Tolerance(limit=1e-8 + 1e-5 * np.abs(right))
        expected = {
            "tensor": Expected(True, "expected a tensor as the output of forward: concatenate the micro-batches"),
            "shape": Expected(list(right.shape), f"expected an output of shape {{expected}}, got {{got}}: {whole}"),
            "output": Expected(right, "", "the output", mistakes, tolerance=close),
            "changed": Expected(False, "the caller's batch was changed: results replace micro-batches in the list"),
        }
        check(grade, call.where, call.got | {"tensor": value is not None, "shape": list(np.shape(value))}, expected)
    if any(call.got["moved"] for call in calls_of(grade, SIMPLE + SETTINGS + SHAPES, last="meta")):
        grade.fail("forward moves the output away from the last device: the result stays where it was computed")
    check_cycles(grade)  # without a schedule, the output would be the same


# --- the graded tests ---


@graded("p.3")
def test_micro_batches_have_split_size_examples(grade: Grade) -> None:
    check_sizes(grade)


@graded("p.3")
def test_compute_is_called_once_for_every_clock_cycle(grade: Grade) -> None:
    check_cycles(grade)


@graded("p.3")
def test_the_output_is_the_micro_batches_in_order_on_the_last_device(grade: Grade) -> None:
    check_output(grade)
