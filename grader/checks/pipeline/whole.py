"""Judges a whole Pipe: outputs and every gradient beside the plain model, written in numpy; all partitions at work."""

from typing import Any

import numpy as np

from grader.checks.pipeline.forward import split_sizes
from grader.checks.pipeline.waits import PATIENCE, Alone, draw_permits, must_end, must_have_permits, must_meet, run_once
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.ranks.referee import PermitReferee
from grader.wire.values import Fields

Arrays = dict[str, np.ndarray]
TOLERANCE = 1e-9  # of the largest number; everything is float64
WIDTH = 3
# (partitions, split size, batches, head): even, with a rest, a split larger than the batch, one partition, one example
# each, one example in all, and a last partition that returns one number per example
SETTINGS = [
    (2, 2, [8], False),
    (3, 3, [7], False),
    (2, 10, [4], False),
    (1, 2, [5], False),
    (3, 1, [4], False),
    (1, 1, [1], False),
    (2, 3, [7], True),
]


def plain(
    weights: list[np.ndarray],
    biases: list[np.ndarray],
    x: np.ndarray,
    loss_weight: np.ndarray,
    head: bool,
    permits: np.ndarray,
) -> Arrays:
    """Output and gradients of the same model without a pipe, for the loss (output * loss_weight).sum().

    permits: (B, stages), what each stage's result is multiplied by for each example. Also returns what each stage was
    given, and what it made before that.
    """  # fmt: skip
    hidden, squashed = [x[:, 1:]], []
    for j, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        squashed.append(np.tanh(hidden[-1] @ weight.T + bias))
        hidden.append(squashed[-1] * permits[:, j : j + 1])
    found = {"output": hidden[-1].sum(axis=1) if head else np.column_stack([x[:, 0], hidden[-1]])}
    gradient = np.repeat(loss_weight[:, None], hidden[-1].shape[1], axis=1) if head else loss_weight[:, 1:]
    for j in reversed(range(len(weights))):
        inner = gradient * permits[:, j : j + 1] * (1 - squashed[j] ** 2)
        found |= {f"stage {j} weight": inner.T @ hidden[j], f"stage {j} bias": inner.sum(axis=0)}
        gradient = inner @ weights[j]
        found[f"given {j}"] = np.column_stack([x[:, 0], hidden[j]])
        found[f"made {j}"] = np.column_stack([x[:, 0], squashed[j]])
    return found | {"x": np.column_stack([0 * loss_weight if head else loss_weight[:, 0], gradient])}


class Whole:
    """Calls of one pipe with drawn weights, and what is right for each.

    `meet`: groups of (micro-batch, partition) that must be at work at the same time, for micro-batches of one example.
    """

    def __init__(
        self, grade: Grade, stages: int, split_size: int, sizes: list[int], head: bool = False, meet: Any = ()
    ) -> None:
        draw = np.random.default_rng([grade.seed, stages, split_size, *sizes])
        self.grade, self.stages, self.split_size, self.sizes = grade, stages, split_size, sizes
        self.setting = f"{stages} partitions, split_size={split_size}, batch"
        weights = [draw.normal(size=(WIDTH, WIDTH)) for _ in range(stages)]
        biases = [draw.normal(size=WIDTH) for _ in range(stages)]
        batches = [np.column_stack([np.arange(size), draw.normal(size=(size, WIDTH))]) for size in sizes]
        loss_weights = [np.asarray(draw.normal(size=len(batch) if head else batch.shape)) for batch in batches]
        permits = draw_permits(draw, (1, sizes[0], stages)) if meet else np.ones((1, max(sizes), stages))
        self.expected = [
            plain(weights, biases, x, r, head, permits[0, : len(x)]) for x, r in zip(batches, loss_weights, strict=True)
        ]
        mine = {"weights": weights, "biases": biases, "batches": batches, "loss_weights": loss_weights}
        referee = {"referee": PermitReferee(permits, meet)} if meet else {}
        self.result: Result = run_once(
            grade, "grader.probes.pipeline.pipe:pipe", 1, **referee, each=[mine], stages=stages, sizes=sizes, head=head,
            split_size=split_size, meet=list(meet), patience=PATIENCE * grade.session.slowness,
        )  # fmt: skip

    def values(self) -> list[Fields]:
        """What the calls gave; the verdict if they did not all come back."""
        counts = [len(split_sizes(size, self.split_size)) for size in self.sizes]
        pairs = [(i, j) for i in range(max(counts)) for j in range(self.stages)]
        must_end(self.grade, self.result, pairs, self.split_size)
        return self.result.values[0]

    def check(self) -> None:
        """Output and gradients of every call."""
        for size, told, expected in zip(self.sizes, self.values(), self.expected, strict=True):
            setting = f"{self.setting} of {size}"
            found = {"output": told["output"]} | told["gradients"]
            for name, value in expected.items():
                if name.startswith(("given", "made")):
                    continue
                if words := self._differ(name, found.get(name), value):
                    self.grade.fail(f"{setting}: {words}")

    def _differ(self, name: str, got: Any, expected: np.ndarray) -> str:
        what = "the output" if name == "output" else f"the gradient of {name}"
        if got is None:
            return f"{what} is missing: the graph from the output back to it is cut, by detach, .data or no_grad"
        if got.shape != expected.shape:
            return f"expected {what} of shape {expected.shape}, got {got.shape}"
        scale = np.abs(expected).max()
        if np.abs(got - expected).max() <= TOLERANCE * scale:
            return ""
        if not np.isfinite(got).all():
            return f"{what} contains inf or nan"
        place = np.unravel_index(np.argmax(np.abs(got - expected)), got.shape)
        pair = f"expected {expected[place]:.6g} (from the plain model), got {got[place]:.6g}"
        cause = (
            "the partitions do not compute what the plain model computes" if name == "output" else _ratio(got, expected)
        )
        return f"{what} is wrong at {[int(index) for index in place]}: {pair}: {cause}"


def _ratio(got: np.ndarray, expected: np.ndarray) -> str:
    factor = float((got * expected).sum() / (expected * expected).sum())
    if abs(factor) > TOLERANCE and np.abs(got - factor * expected).max() <= TOLERANCE * np.abs(expected).max():
        return f"it is {factor:.3g} times the right one"
    if not got.any():
        return "it is zero: the graph is cut"
    return "is every micro-batch in the output exactly once?"


def check_plain(grade: Grade) -> None:
    """Outputs and every gradient are those of the plain model."""
    for stages, split_size, sizes, head in SETTINGS:
        Whole(grade, stages, split_size, sizes, head).check()
    check_same_time(grade)  # a model that is called without workers agrees of course


def check_again(grade: Grade) -> None:
    """The pipe can be called again, with larger and smaller batches and without gradients; the sizes stay right."""
    stages, split_size, sizes = 2, 4, [3, 9, 5]
    whole = Whole(grade, stages, split_size, sizes)
    told = whole.values()
    seen: dict[int, list[list[int]]] = {j: [] for j in range(stages)}
    for event in whole.result.ranks[0].events:
        if event.name == "enter":
            seen[event.data["place"][1]].append(event.data["marks"])
    starts = [(size, start) for size in sizes for _ in range(2) for start in range(0, size, split_size)]
    expected = [list(range(start, min(start + split_size, size))) for size, start in starts]
    for j, marks in seen.items():
        if marks != expected:
            where = next((k for k, (a, b) in enumerate(zip(marks, expected, strict=False)) if a != b), len(marks))
            got, wanted = (short(row[where] if where < len(row) else "none", 200) for row in (marks, expected))
            later = where >= len(split_sizes(sizes[0], split_size))  # the first call went well
            grade.fail(
                f"batches of {sizes}, each with and without gradients, split_size={split_size}: partition {j} worked "
                f"on the examples {got}, expected {wanted}"
                f"{'; is something left over from an earlier call?' if later else ''}"
            )
    if any(call["without_grad"] for call in told):
        grade.fail(
            "the output requires a gradient under torch.no_grad(): use a Task, which keeps the caller's grad mode"
        )
    whole.check()


def check_same_time(grade: Grade) -> None:
    """Through the whole pipe: micro-batch i in partition 0 and i - 1 in partition 1 are at work at once."""
    groups = [[[i, 0], [i - 1, 1]] for i in range(1, 4)]
    whole = Whole(grade, 2, 1, [4], meet=groups)
    must_meet(grade, whole.result, _why_alone)
    whole.values()
    worked = {tuple(event.data["place"]) for event in whole.result.ranks[0].events if event.name == "enter"}
    if idle := sorted({(i, j) for group in groups for i, j in group} - worked):
        i, j = idle[0]
        grade.fail(
            f"micro-batch {i} never reached partition {j}: forward must send every micro-batch through self.compute"
        )
    given = {(0, i, j): whole.expected[0][f"given {j}"][i : i + 1] for i in range(4) for j in range(2)}
    made = {(0, i, j): whole.expected[0][f"made {j}"][i : i + 1] for i in range(4) for j in range(2)}
    must_have_permits(grade, whole.result, given, made)
    whole.check()


def _why_alone(alone: Alone) -> str:
    """compute is known to be right here: it is another region, and this one builds on it."""
    if alone.largest > 1:
        return f"it got {alone.largest} examples at once with split_size=1, so there are too few micro-batches"
    return "pass compute all pairs of a clock cycle at once; otherwise the partitions run one after another"
