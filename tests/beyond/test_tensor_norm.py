"""Tensor parallelism, b.12: the norm of a model's gradient, in which every parameter counts once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import Tolerance
from grader.call_checks import all_calls
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.tensor_shared import ALL, Ranks, check_groups
from tests.beyond.toy_shared import once_in_bfloat16

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, Tensor, copy_of, dist, dtype_of, nn, own_group, torch
    from tests.beyond.tensor_in_rank import conv1d

graded = pytest.mark.graded
IN_RANK = "tests/beyond/tensor_in_rank.py"
INSIDE, OUTSIDE = 3, 8
MESSAGE = 64  # bytes: enough for a message with a sum of squares
SLICES = ("mlp.fc.weight", "mlp.fc.bias", "mlp.proj.weight")
WHOLE = {"norm.weight": (INSIDE,), "norm.bias": (INSIDE,), "mlp.proj.bias": (INSIDE,), "head.weight": (OUTSIDE, INSIDE)}
DTYPES = ("float32", "float32", "float32", "float32", "float64", "bfloat16", "float32", "float32")
WITHOUT = ((), ("norm.weight", "mlp.fc.bias"), SLICES, tuple(WHOLE), (), ("head.weight",), (), ())  # no gradient
ZERO, LOST = 6, 7  # the cases in which the slices of the group's last rank are zero, and one of them is nan


def mixed_model(
    lesson: ModuleType, part: Tensor, inside: int, outside: int, group: dist.ProcessGroup | None
) -> nn.ModuleDict:
    """Return a model with slices in several depths, a layer norm, and a parameter that two modules share."""
    first = conv1d(torch.zeros(inside, outside), torch.zeros(outside))
    second = conv1d(torch.zeros(outside, inside), torch.zeros(inside))
    layers = {"fc": lesson.ColumnParallel(first, part, group), "proj": lesson.RowParallel(second, part, group)}
    heads = {name: nn.Linear(inside, outside, bias=False) for name in ("head", "again")}
    heads["again"].weight = heads["head"].weight
    return nn.ModuleDict({"norm": nn.LayerNorm(inside), "mlp": nn.ModuleDict(layers), **heads})


@in_rank(uses=[IN_RANK, mixed_model])
def norms(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield squared_norm of a model in each case, and the gradients that it leaves."""
    group, (inside, outside) = own_group(context), context.arguments["sizes"]
    model = mixed_model(lesson, inputs["part"], inside, outside, group)
    for dtype, gradients in zip(context.arguments["dtypes"], inputs["gradients"], strict=True):
        model.to(getattr(torch, dtype))
        for name, parameter in model.named_parameters():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype).clone()
        value = lesson.squared_norm(model) if group is None else lesson.squared_norm(model, group)
        left = {name: copy_of(parameter.grad) for name, parameter in model.named_parameters()}
        number = copy_of(value)
        if number is not None and number.numel() == 1:
            number = number.flatten()[0]
        graph = number is not None and value.requires_grad
        yield left | {"norm": number, "kind": dtype_of(value), "graph": graph}


def draw_gradients(grade: Grade, ranks: Ranks, rank: int, part: np.ndarray, case: int) -> Fields:
    """Draw gradients: those of slices differ between the ranks of a group, all others are the same."""
    group = ranks.among(rank)
    own = drawn.generator(grade.seed, 46, ranks.count, rank, case)
    same = drawn.generator(grade.seed, 47, ranks.count, *group, case)
    shapes: tuple[tuple[int, ...], ...] = ((INSIDE, len(part)), (len(part),), (len(part), INSIDE))
    slices = {
        name: own.normal(size=shape, scale=1 + group.index(rank)) for name, shape in zip(SLICES, shapes, strict=True)
    }
    if case in (ZERO, LOST) and len(group) > 1 and rank == group[-1]:
        slices = {name: value * 0 for name, value in slices.items()}
        slices[SLICES[0]].flat[0] = np.nan if case == LOST else 0
    whole = {name: same.normal(size=shape) for name, shape in WHOLE.items()}
    return {name: None if name in WITHOUT[case] else value for name, value in (slices | whole).items()}


def check_norm(grade: Grade, ranks: Ranks) -> None:
    """Check that every rank of a group gets the square of the norm, in which each parameter counts once."""
    inputs: list[Fields] = []
    for rank in range(ranks.count):
        group = ranks.among(rank)
        part = np.array_split(np.arange(OUTSIDE), len(group))[group.index(rank)]
        gradients = [draw_gradients(grade, ranks, rank, part, case) for case in range(len(WITHOUT))]
        inputs.append({"part": part, "gradients": gradients})
    arguments: Fields = {"groups": ranks.groups, "sizes": (INSIDE, OUTSIDE), "dtypes": DTYPES}
    result = run(grade, norms, inputs, **arguments)
    check_groups(grade, result, ranks)
    for rank, values in enumerate(result.values):
        for case, got in enumerate(values):
            group = ranks.among(rank)
            without = f", {', '.join(WITHOUT[case])} without gradient" if WITHOUT[case] else ""
            where = f"squared_norm, {ranks.words(rank)}, case {case}{without}: "
            if got["norm"] is None or np.ndim(got["norm"]):
                kind = got["kind"] if got["norm"] is None else f"the shape {np.shape(got['norm'])}"
                grade.fail(observed=f"{where}expected a tensor with one number, got {kind}")
            graph = "the result requires a gradient: compute it outside the graph, for example under no_grad"
            members = [inputs[other]["gradients"][case] for other in group]
            expected = {"graph": Expected(False, graph), "norm": expected_norm(members, group.index(rank), case)}
            for name, gradient in members[group.index(rank)].items():
                changed = f"squared_norm changes the gradient of {name}, which the step needs"
                kept = Tolerance() if gradient is None else once_in_bfloat16(gradient, 1.0)
                expected[name] = Expected(gradient, changed, tolerance=kept)
            check(grade, where, got, expected, result)
    for call in all_calls(result):
        if call.payload and len(call.payload) > MESSAGE:
            sent = f"squared_norm passes {len(call.payload)} bytes to {call.name} ({call.where})"
            grade.fail(f"{ranks.words(call.rank)}: {sent}: each rank adds up its squares; send only this number")


def expected_norm(members: list[Fields], own: int, case: int) -> Expected:
    """Expect the square of the norm of these gradients. `members`: the gradients of each member of a group."""

    def squares(names: Iterable[str], gradients: Mapping[str, Any]) -> float:
        return sum(float(np.sum(np.square(gradients[name]))) for name in names if gradients[name] is not None)

    n, slices = len(members), [squares(SLICES, gradients) for gradients in members]
    whole, bias = squares(WHOLE, members[0]), squares(["mlp.proj.bias"], members[0])
    right = sum(slices) + whole
    mistakes = {
        "only this rank's slices are in it: sum the squares of slices over the group": slices[own] + whole,
        f"what all ranks have counts {n} times: only slices are summed over the group": sum(slices) + n * whole,
        f"the bias of the RowParallel counts {n} times: it is whole on every rank, see `sliced`": right
        + (n - 1) * bias,
        "head.weight counts twice: two modules share it, and it is one parameter": right
        + squares(["head.weight"], members[0]),
        "only slices are in it: add what all ranks have, once": sum(slices),
        "the norm was returned: expected its square": right**0.5,
        "{name} was divided by the number of ranks": right / n,
        "the slices were averaged over the group; expected their sum": sum(slices) / n + whole,
        "norms of slices were added: squares add up, norms do not": sum(one**0.5 for one in slices) ** 2 + whole,
    }
    rough = 2e-2 if DTYPES[case] == "bfloat16" else 1e-5
    tolerance = Tolerance(limit=rough * right + 1e-12)
    return Expected(
        np.asarray(right), name="the square of the norm", mistakes=mistakes if n > 1 else {}, tolerance=tolerance
    )


@graded("b.12")
def test_the_norm_counts_every_parameter_once(grade: Grade) -> None:
    for ranks in ALL:
        check_norm(grade, ranks)
