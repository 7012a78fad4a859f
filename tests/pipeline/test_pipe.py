"""A whole Pipe, p.3: output and gradients are those of the plain model, in numpy, and all partitions work at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import Tolerance
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank
from grader.ranks.outcome import Result
from grader.wire.values import Fields
from tests.pipeline import pipe_shared as shared
from tests.pipeline.pipe_shared import IN_RANK, Watched, split_sizes

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, nn, torch
    from tests.pipeline.pipe_in_rank import (
        NeverArrives,
        PipeWatch,
        WatchedStage,
        give_schedule,
        live_tensors,
        watch_queues,
    )

graded = pytest.mark.graded
CRASHES = shared.CRASHES
Arrays = dict[str, np.ndarray]
WIDTH = 3
CALLS = 6  # of one pipe, to see whether it keeps anything of them
# (partitions, split size, batch): even, with a smaller last micro-batch, a split larger than the batch, one partition,
# micro-batches of one example, one example in all
SETTINGS = ((2, 2, 8), (3, 3, 7), (2, 10, 4), (1, 2, 5), (3, 1, 4), (1, 1, 1))


# --- what a rank does ---


def layer_of(weight: torch.Tensor, bias: torch.Tensor) -> nn.Module:
    """Return a layer (B, 1 + D) -> (B, 1 + D): tanh(W x + b) of all columns but the first, which marks the example."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:, :1], torch.tanh(x[:, 1:] @ self.weight.T + self.bias)], dim=1)

    return Layer()


@in_rank(uses=[IN_RANK, layer_of], preload=["steps"], join=False)
def pipe(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return the output and the gradients of its weighted sum for each call of a whole Pipe."""
    from pipeline.partition import WithDevice

    def step(x: torch.Tensor, loss_weight: torch.Tensor) -> Fields:
        """Return output and gradients of one call of the pipe."""
        whole.zero_grad()
        context.during = "calling the pipe"
        output = whole(x)
        values = {"output": copy_of(output)}
        if output.shape != loss_weight.shape:
            return values
        context.during = "the backward pass"
        (output * loss_weight).sum().backward()
        values |= {
            f"stage {j} {name}": p.grad for j, layer in enumerate(layers) for name, p in layer.named_parameters()
        }
        return values | {"x": x.grad}

    layers = [layer_of(*pair) for pair in zip(inputs["weights"], inputs["biases"], strict=True)]
    watch = PipeWatch(context, context.arguments["meet"])
    stages = [WatchedStage(watch, j, layer) for j, layer in enumerate(layers)]
    labelled = nn.Sequential(*(WithDevice(stage, f"cpu:{j}") for j, stage in enumerate(stages)))
    give_schedule(lesson, context.arguments["given"])
    whole = lesson.Pipe(labelled, context.arguments["split_size"])
    watch_queues(whole, watch)
    try:
        batches = zip(inputs["batches"], inputs["loss_weights"], strict=True)
        values = [step(x.clone().requires_grad_(), loss_weight) for x, loss_weight in batches]
        counts = []
        for _ in range(context.arguments["calls"]):
            whole(inputs["batches"][0].clone())
            counts.append(live_tensors())
        return values + [{"kept": counts[-1] - counts[1]}] if counts else values
    except NeverArrives:
        return {"waits_forever": True}


# --- what is right ---


def plain(weights: Sequence[np.ndarray], biases: Sequence[np.ndarray], x: np.ndarray, loss_weight: Any) -> Arrays:
    """Return output and gradients of the same model without a pipe, for the loss (output * loss_weight).sum()."""
    hidden = [x[:, 1:]]
    for weight, bias in zip(weights, biases, strict=True):
        hidden.append(np.tanh(hidden[-1] @ weight.T + bias))
    right, gradient = {"output": np.column_stack([x[:, 0], hidden[-1]])}, loss_weight[:, 1:]
    for j in reversed(range(len(weights))):
        inner = gradient * (1 - hidden[j + 1] ** 2)
        right |= {f"stage {j} weight": inner.T @ hidden[j], f"stage {j} bias": inner.sum(axis=0)}
        gradient = inner @ weights[j]
    return right | {"x": np.column_stack([loss_weight[:, 0], gradient])}


class Whole:
    """Calls of one pipe with drawn weights, and what is right for each.

    `meet`: groups of (micro-batch, partition) that must run at the same time, for micro-batches of one example.
    """

    def __init__(
        self,
        grade: Grade,
        stages: int,
        split_size: int,
        sizes: list[int],
        meet: Iterable[shared.Pairs] = (),
        calls: int = 0,
    ) -> None:
        draw = np.random.default_rng([grade.seed, stages, split_size, *sizes])
        self.grade, self.sizes, self.split_size = grade, sizes, split_size
        self.setting = f"{stages} partitions, split_size={split_size}, batch"
        counts = [len(split_sizes(size, split_size)) for size in sizes]
        self.pairs = [(i, j) for i in range(max(counts)) for j in range(stages)]
        weights = [draw.normal(size=(WIDTH, WIDTH)) for _ in range(stages)]
        biases = [draw.normal(size=WIDTH) for _ in range(stages)]
        batches = [np.column_stack([np.arange(size), draw.normal(size=(size, WIDTH))]) for size in sizes]
        loss_weights = [draw.normal(size=batch.shape) for batch in batches]
        self.expected = [plain(weights, biases, x, r) for x, r in zip(batches, loss_weights, strict=True)]
        inputs = {"weights": weights, "biases": biases, "batches": batches, "loss_weights": loss_weights}
        cycles = [(count, stages) for count in {*counts}]
        arguments: Fields = {
            "split_size": split_size,
            "meet": list(meet),
            "sizes": cycles,
            "calls": calls,
        }
        self.result: Result = shared.run_pipe(grade, pipe, [inputs], **arguments)
        self.watched = Watched(self.result.ranks[0].events)

    def values(self) -> list[Arrays]:
        """Return the values of the calls; raise the verdict if they did not all return."""
        shared.must_end(self.grade, self.result, self.pairs, self.split_size)
        return self.result.values[0]

    def check(self) -> None:
        """Check output and gradients of every call."""
        for size, got, right in zip(self.sizes, self.values(), self.expected, strict=False):
            expected = {}
            for name, value in right.items():
                cut = "the graph from the output back to it is cut, by detach, .data or no_grad"
                called = "the output" if name == "output" else f"the gradient of {name}"
                exact = Tolerance(limit=1e-9 * np.abs(value).max())  # everything is float64
                expected[name] = Expected(value, cut if got.get(name) is None else "", called, tolerance=exact)
            check(self.grade, f"{self.setting} of {size}: ", got, expected)


# --- what is judged ---


def check_again(grade: Grade) -> None:
    """Check that the pipe can be called again with larger and smaller batches, and that the sizes stay right."""
    stages, split_size, sizes = 2, 4, [3, 9, 5]
    whole = Whole(grade, stages, split_size, sizes)
    whole.values()
    where = f"batches of {sizes}, split_size={split_size}: "
    starts = [(size, start) for size in sizes for start in range(0, size, split_size)]
    right = [list(range(start, min(start + split_size, size))) for size, start in starts]
    for j in range(stages):
        got = [enter["marks"] for enter in whole.watched.enters if enter["place"][1] == j]
        common = min(len(got), len(right))
        number = next((k for k in range(common) if got[k] != right[k]), common)
        later = "; is something left over from an earlier call?" if number else ""
        message = f"partition {j} worked on the examples {{got}}, expected {{expected}}{later}"
        got_marks, right_marks = ("none" if number >= len(marks) else str(marks[number]) for marks in (got, right))
        check(grade, where, {"examples": got_marks}, {"examples": Expected(right_marks, message)})
    whole.check()


def check_nothing_kept(grade: Grade) -> None:
    """Check that with more calls of a pipe no more tensors are in memory."""
    whole = Whole(grade, *SETTINGS[0][:2], [SETTINGS[0][2]], calls=CALLS)
    whole.check()
    if (kept := whole.values()[-1]["kept"]) >= CALLS - 2:
        grade.fail(
            f"{whole.setting} of {whole.sizes[0]}: after {CALLS - 2} more calls, {kept} more tensors are in "
            "memory: keep nothing of a call, neither in self nor elsewhere; a micro-batch holds its whole graph"
        )


def check_same_time(grade: Grade) -> None:
    """Check that micro-batch i in partition 0 and i - 1 in partition 1 run at the same time, in the whole pipe."""
    groups = [[[i, 0], [i - 1, 1]] for i in range(1, 4)]
    whole = Whole(grade, 2, 1, [4], meet=groups)

    def why_alone(watched: Watched, _: int) -> str:  # p.4, on which this region builds, is right
        largest = max((len(enter["marks"]) for enter in watched.enters), default=0)
        if largest > 1:
            return f"it got {largest} examples at once with split_size=1, so there are too few micro-batches"
        return "pass compute all pairs of a clock cycle at once; otherwise the partitions run one after another"

    shared.must_meet(grade, whole.result, why_alone)
    whole.check()
    shared.must_have_met(grade, whole.result, groups)


# --- the graded tests ---


@graded("p.3")
def test_output_and_gradients_of_a_pipe_are_those_of_the_plain_model(grade: Grade) -> None:
    check_nothing_kept(grade)
    for stages, split_size, size in SETTINGS[1:]:
        Whole(grade, stages, split_size, [size]).check()
    check_same_time(grade)  # a model without workers would have the right values, too
    check_again(grade)


@graded("p.3")
def test_the_partitions_of_a_pipe_work_at_the_same_time(grade: Grade) -> None:
    check_same_time(grade)
