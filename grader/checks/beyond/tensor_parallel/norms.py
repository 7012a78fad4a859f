"""Judges squared_norm: slices are summed over the group, what all ranks have counts once."""

from typing import Any

import numpy as np

from grader.checks import diagnosis
from grader.checks.beyond.sharded_optimizer.sharded_run import students_call
from grader.checks.beyond.tensor_parallel.tensor_settings import PROBE
from grader.grading import Grade
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.tensor_shared import Ranks

INSIDE, OUTSIDE = 3, 8
NUMBERS = 64  # bytes of a message that holds the sum of some squares
SLICED = ("mlp.fc.weight", "mlp.fc.bias", "mlp.proj.weight")
WHOLE = {"norm.weight": (INSIDE,), "norm.bias": (INSIDE,), "mlp.proj.bias": (INSIDE,), "head.weight": (OUTSIDE, INSIDE)}
DTYPES = ("float32", "float32", "float32", "float32", "float64", "bfloat16")
WITHOUT = (  # of each case, the parameters without gradient
    (), ("norm.weight", "mlp.fc.bias"), SLICED, tuple(WHOLE), (), ("head.weight",),
)  # fmt: skip
ROUGH = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 2e-2}


def check(grade: Grade, ranks: Ranks) -> None:
    """The square of the norm, the same on all ranks of a group."""
    given = [[_gradients(grade, ranks, rank, case) for case in range(len(DTYPES))] for rank in range(ranks.count)]
    each = [{"indices": _indices(ranks, rank), "cases": given[rank]} for rank in range(ranks.count)]
    result = grade.run(
        f"{PROBE}:norms", ranks.count, payloads=True, each=each, inside=INSIDE, outside=OUTSIDE,
        groups=list(map(list, ranks.groups)), dtypes=list(DTYPES),
    )  # fmt: skip
    grade.must_return(result)
    lost = diagnosis.forgotten_waits(result)
    for rank, value in enumerate(result.values):
        for case, told in enumerate(value):
            where = f"{f'{lost}{chr(10)}' if lost else ''}squared_norm, {ranks.words(rank)}, case {case}"
            if WITHOUT[case]:
                where += f", {', '.join(WITHOUT[case])} without gradient"
            if told["value"] is None or np.size(told["value"]) != 1:
                got = told["kind"] if told["value"] is None else f"the shape {np.shape(told['value'])}"
                grade.fail(f"{where}: expected a tensor with one number, got {got}")
            if told["graph"]:
                grade.fail(
                    f"{where}: the result requires a gradient: compute it outside the graph, for example under no_grad"
                )
            members = [given[other][case] for other in ranks.among(rank)]
            _check_value(grade, float(np.ravel(told["value"])[0]), members, ranks.among(rank).index(rank), case, where)
            for name, gradient in given[rank][case].items():
                left = told["left"][name]
                same = left is None if gradient is None else left is not None and np.allclose(left, gradient, rtol=1e-2)
                if not same:
                    grade.fail(f"{where}: the gradient of {name} is changed; it is needed for the step")
    for rank_result in result.ranks:
        for call in filter(students_call, rank_result.calls):
            if call.payload and len(call.payload) > NUMBERS:
                grade.fail(
                    f"{ranks.words(rank_result.rank)}: squared_norm passes {len(call.payload)} bytes to {call.name} "
                    f"({call.where}): each rank adds up its squares; send only this number"
                )


def _indices(ranks: Ranks, rank: int) -> np.ndarray:
    group = ranks.among(rank)
    return np.asarray(np.array_split(np.arange(OUTSIDE), len(group))[group.index(rank)])


def _gradients(grade: Grade, ranks: Ranks, rank: int, case: int) -> dict[str, np.ndarray | None]:
    """Those of slices differ between the ranks of a group, all others are the same."""
    group, part = ranks.among(rank), len(_indices(ranks, rank))
    own = drawn.generator(grade.seed, 46, ranks.count, rank, case)
    shared = drawn.generator(grade.seed, 47, ranks.count, *group, case)
    shapes: dict[str, tuple[int, ...]] = dict(zip(SLICED, ((INSIDE, part), (part,), (part, INSIDE)), strict=True))
    found = {name: own.normal(size=shape, scale=1 + group.index(rank)) for name, shape in shapes.items()}
    found |= {name: shared.normal(size=shape) for name, shape in WHOLE.items()}
    return {name: None if name in WITHOUT[case] else value for name, value in found.items()}


def _check_value(grade: Grade, got: float, members: list[Fields], own: int, case: int, where: str) -> None:
    def squares(names: Any, of: Fields) -> float:
        return sum(float(np.sum(np.square(of[name]))) for name in names if of[name] is not None)

    slices, n = [squares(SLICED, one) for one in members], len(members)
    whole, biases = squares(WHOLE, members[0]), squares(["mlp.proj.bias"], members[0])
    right, shared = sum(slices) + whole, squares(["head.weight"], members[0])
    if abs(got - right) <= ROUGH[DTYPES[case]] * right + 1e-12:
        return
    known = {
        "only this rank's slices are in it: sum the squares of slices over the group": slices[own] + whole,
        f"what all ranks have counts {n} times: only slices are summed over the group": sum(slices) + n * whole,
        f"the bias of the RowParallel counts {n} times: it is whole on every rank, see `sliced`": right
        + (n - 1) * biases,
        "head.weight counts twice: two modules share it, and it is one parameter": right + shared,
        "only slices are in it: add what all ranks have, once": sum(slices),
        "only what all ranks have is in it": whole,
        "it is the norm: expected its square": right**0.5,
        "it was divided by the number of ranks": right / n,
        "the slices were averaged over the group; expected their sum": sum(slices) / n + whole,
        "what all ranks have was divided by their number; only sums are divided": sum(slices) + whole / n,
        "norms of slices were added: squares add up, norms do not": sum(one**0.5 for one in slices) ** 2 + whole,
    }
    words = next((f"{words}\n" for words, value in known.items() if n > 1 and abs(got - value) <= 1e-4 * value), "")
    grade.fail(f"{words}{where}: expected {right:.6g}, got {got:.6g}")
