"""Judges what averages gradients: sync_gradients and average_gradients, on drawn gradients, alone."""

from typing import Any

import numpy as np

from grader import diagnosis, draws, reference
from grader.grading import Grade
from grader.outcome import Result

WORLD_SIZES = (3, 2, 4)  # 3 first: there no wrong factor looks like another
ODD = {
    "shapes": [[4, 3], [5], [4, 3], [2, 2], [3, 5], [6], [4, 3]],
    "frozen": [1],
    "without": [3, 5],
    "strided": [4],
    "zero": [2],
    "tied": True,
}
PLAIN: dict[str, Any] = {
    "shapes": [list(shape) for shape in draws.SHAPES],
    "frozen": [],
    "without": [],
    "strided": [],
    "zero": [],
    "tied": False,
}


def averaged(grade: Grade, function: str, world_size: int, setting: dict) -> Result:
    """One run of the student's function. Raises the verdict if it did not return on every rank."""
    each = inputs(grade, world_size, setting)
    result = grade.run("grader.probes_sync:average", world_size, function=function, seed=None, each=each, **setting)
    grade.must_return(result)
    return result


def inputs(grade: Grade, world_size: int, setting: dict) -> list[list[np.ndarray]]:
    """Each rank's gradients before they are averaged; those named `zero` are zero on the last rank, and no other."""
    each = [draws.gradients(grade.seed, rank, setting["shapes"]) for rank in range(world_size)]
    for k in setting["zero"]:
        each[-1][k] = np.zeros_like(each[-1][k])
    return each


def check_mean(grade: Grade, function: str, setting: dict = PLAIN) -> None:
    """Every rank must hold the mean in every param.grad, and None where there was none; parameters stay as they are."""
    for world_size in WORLD_SIZES:
        result = averaged(grade, function, world_size, setting)
        each = inputs(grade, world_size, setting)
        left_out = [*setting["frozen"], *setting["without"]]
        kept = [k for k in range(len(setting["shapes"])) if k not in left_out]
        got = [value["grads"] for value in result.values]
        for rank, value in enumerate(result.values):
            if value["moved"]:
                grade.fail(f"the parameters themselves changed on rank {rank}: only param.grad is to be averaged")
            for k in left_out:
                if got[rank][k] is not None:
                    what = "is frozen" if k in setting["frozen"] else "had no gradient"
                    grade.fail(f"parameter {k} {what} on every worker, and has a gradient on rank {rank} now")
        check_means(
            grade, result, [[g[k] for k in kept] for g in got], [[mine[k] for k in kept] for mine in each], kept
        )


def check_means(grade: Grade, result: Result, got: list, inputs: list, names: list) -> None:
    """Fails with the first difference between `got[rank][k]` and the mean, and the mistake that it looks like."""
    means = reference.means(inputs)
    total = reference.norm({str(k): mean for k, mean in enumerate(means)})
    for rank, mine in enumerate(got):
        for k, mean in enumerate(means):
            if reference.close(mine[k], mean, total):
                continue
            where = diagnosis.parameter_words(f"parameter {names[k]}", mine[k], mean)
            cause = diagnosis.forgotten_waits(result) or diagnosis.name_wrong_mean(got, inputs)
            text = f"expected the mean of {len(inputs)} workers' gradients; on rank {rank}, {where}"
            grade.fail(f"{cause}\n{text}" if cause else text)


def bytes_handed_in(result: Result, name: str) -> list[int]:
    """Per rank, the bytes of all calls of one operation."""
    return [sum(call.sent for call in rank.calls if call.name == name) for rank in result.ranks]


def names_used(result: Result) -> set[str]:
    """The operations that were called, without the join and barriers."""
    return {call.name for rank in result.ranks for call in rank.calls} - {"init_process_group", "barrier"}


def size_of(shapes: list) -> int:
    """Bytes of tensors of these shapes in float32."""
    return sum(4 * int(np.prod(shape)) for shape in shapes)


def check_gather_and_scatter(grade: Grade, function: str) -> None:
    """Rank 0, and no other, gathers every gradient once and scatters a list of as many means."""
    for world_size in (3, 4):
        result = averaged(grade, function, world_size, PLAIN)
        used, size = names_used(result), size_of(PLAIN["shapes"])
        if used != {"gather", "scatter"}:
            grade.fail(f"expected gather and scatter and nothing else, got {_words(used)}")
        roots = {call.root for rank in result.ranks for call in rank.calls if call.name in used}
        if roots != {0}:
            grade.fail(f"expected rank 0 to gather and to scatter, got the roots {sorted(map(str, roots))}")
        _compare(grade, "gather", bytes_handed_in(result, "gather"), [size] * world_size)
        _compare(grade, "scatter", bytes_handed_in(result, "scatter"), [world_size * size] + [0] * (world_size - 1))


def check_reduced_once(grade: Grade, function: str, setting: dict = PLAIN) -> None:
    """All gradients are reduced once: by all_reduce, or by reduce and broadcast."""
    for world_size in (3, 4):
        result = averaged(grade, function, world_size, setting)
        used = names_used(result)
        left_out = [*setting["frozen"], *setting["without"]]
        size = size_of([shape for k, shape in enumerate(setting["shapes"]) if k not in left_out])
        if used == {"all_reduce"}:
            _compare(grade, "all_reduce", bytes_handed_in(result, "all_reduce"), [size] * world_size)
        elif used == {"reduce", "broadcast"}:
            _compare(grade, "reduce", bytes_handed_in(result, "reduce"), [size] * world_size)
            if sum(bytes_handed_in(result, "broadcast")) != size:
                grade.fail("expected each sum to be broadcast once")
        else:
            grade.fail(f"expected the gradients to be reduced with all_reduce, got {_words(used)}")


def _compare(grade: Grade, name: str, got: list[int], expected: list[int]) -> None:
    for rank, (mine, right) in enumerate(zip(got, expected, strict=True)):
        if not right <= mine <= 1.02 * right:
            times = f", {mine / right:.2f} times as much" if right else ""
            grade.fail(f"rank {rank} hands {mine} bytes to {name}, expected {right}{times}: each gradient travels once")


def _words(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "no collective at all"
