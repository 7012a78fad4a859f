"""Judges clipping: the norm of all shards of all ranks, and one factor for their gradients."""

import numpy as np

from grader.arithmetic import difference
from grader.checks import reference
from grader.checks.beyond.sharded_optimizer import sharded_settings
from grader.checks.beyond.sharded_optimizer.sharded_run import PROBE, described, initial_values, students_call
from grader.compare import forgotten_waits
from grader.grading import Grade
from grader.wire import drawn

LARGE_LIMIT = 1e6
NUMBERS = 3000  # bytes of a run that clipping may send: numbers, and no gradients


def check_clip(grade: Grade) -> None:
    """Every rank gets the norm of all ranks' shards, and scales its own by the same factor of at most 1."""
    for n in (3, 2, 4, 1):
        setting = {3: sharded_settings.ODD, 2: sharded_settings.LARGE}.get(n, sharded_settings.PLAIN)
        buckets = setting.buckets()
        values = initial_values(grade, setting)
        lengths = [setting.flat(bucket, values, n).shape[1] for bucket in buckets]
        shards = [_shards(grade, n, rank, lengths) for rank in range(n)]
        norms = [
            np.sqrt(sum(np.sum(np.square(one, dtype=float)) for mine in shards for one in mine[c])) for c in (0, 1, 2)
        ]
        limits = [float(norms[0] / 4), LARGE_LIMIT, float(norms[2] * 1.5)]
        each = [{"values": values, "shards": mine} for mine in shards]
        told = described(setting) | {"limits": limits}
        result = grade.run(f"{PROBE}:clip", n, each=each, **told)
        grade.must_return(result)
        for rank, cases in enumerate(result.values):
            for c, case in enumerate(cases):
                where = f"{n} ranks, clip({limits[c]:.5g}) on rank {rank}"
                cause = forgotten_waits(result)
                _check_norm(grade, case["norm"], [mine[c] for mine in shards], rank, limits[c], f"{where}: ", cause)
                _check_scaled(grade, case["gradients"], shards[rank][c], float(norms[c]), limits[c], where)
        for rank_result in result.ranks:
            calls = [call for call in rank_result.calls if students_call(call)]
            if sum(call.price for call in calls) > NUMBERS:
                dearest = max(calls, key=lambda call: call.price)
                grade.fail(
                    f"{n} ranks: clip sends {int(dearest.price)} bytes in {dearest.name} ({dearest.where}): each rank "
                    "adds up the squares of its shards; send only this number"
                )


def _shards(grade: Grade, n: int, rank: int, lengths: list[int]) -> list[list[np.ndarray]]:
    """[case][bucket]: gradients of a rank's shards; those of the last rank are larger, and of bucket 1, too."""
    draw = drawn.generator(grade.seed, 17, n, rank)
    return [
        [
            np.asarray(draw.normal(size=length, scale=(1 + rank) * (1 + i)), np.float32)
            for i, length in enumerate(lengths)
        ]
        for _ in range(3)
    ]


def _check_norm(
    grade: Grade, told: dict, shards: list[list[np.ndarray]], rank: int, limit: float, where: str, cause: str
) -> None:
    squares = [[float(np.sum(np.square(one, dtype=float))) for one in mine] for mine in shards]  # [rank][bucket]
    right = float(np.sqrt(sum(map(sum, squares))))
    if "type" in told or np.shape(told["values"]) != ():
        got = told.get("type") or f"a tensor of shape {np.shape(told['values'])}"
        grade.fail(f"{where}expected the norm as a tensor without dimensions, got {got}")
    got = float(told["values"])
    if np.isfinite(got) and abs(got - right) <= 1e-5 * right:
        return
    n, mine = len(squares), squares[rank]
    known = {
        "the norm is that of only this rank's shards: add up the squares of all ranks first": np.sqrt(sum(mine)),
        "the norm is the sum of the ranks' norms: squares add up, norms do not": sum(
            np.sqrt(sum(one)) for one in squares
        ),
        "the norm is the sum of the buckets' norms: squares add up, norms do not": sum(
            float(np.sqrt(sum(column))) for column in zip(*squares, strict=True)
        ),
        "the norm is the sum of all shards' norms: squares add up, norms do not": sum(
            float(np.sqrt(one)) for row in squares for one in row
        ),
        "the result is the square of the norm: take the square root at the end": right**2,
        "the norm is that of only the last bucket": float(np.sqrt(sum(row[-1] for row in squares))),
        "the sum of squares was divided by the number of ranks": right / np.sqrt(n),
        "the norm was divided by the number of ranks": right / n,
        "the norm is the largest of the ranks' norms": float(np.sqrt(max(map(sum, squares)))),
        "the norm is that after clipping: return the norm before": min(right, limit),
    }
    words = next((words for words, value in known.items() if abs(got - value) <= 1e-4 * abs(value)), "")
    grade.fail(f"{cause or words or 'the norm is wrong'}\n{where}expected the norm {right:.6g}, got {got:.6g}")


def _check_scaled(
    grade: Grade, told: list[dict], before: list[np.ndarray], norm: float, limit: float, where: str
) -> None:
    factor = min(1.0, limit / (norm + 1e-6))
    for i, (one, mine) in enumerate(zip(told, before, strict=True)):
        if "type" in one:
            grade.fail(f"{where}: expected a tensor as the gradient of bucket {i}'s shard, got {one['type']}")
        got, right = one["values"], mine.astype(float) * factor
        if reference.close(got, right, float(np.linalg.norm(right))):
            continue
        scale = f"the norm is {norm:.5g}, so the factor is {factor:.5g}"
        words = difference(f"the gradient of bucket {i}'s shard", got, right)
        grade.fail(f"{_name_factor(got, mine, factor, norm, limit)}\n{where}: {scale}; {words}")


def _name_factor(got: np.ndarray, mine: np.ndarray, factor: float, norm: float, limit: float) -> str:
    if np.shape(got) == mine.shape:
        found = float(np.vdot(mine, got) / np.vdot(mine, mine))
        if not np.allclose(got, mine * found, rtol=1e-4, atol=1e-4):
            return "the elements of a gradient are not scaled by one factor"
        if factor == 1.0:
            raised = "; a norm below max_norm is no reason to scale up" if found > 1 else ""
            return f"gradients are multiplied by {found:.5g}, expected 1: the factor is at most 1{raised}"
        if abs(found - 1) < 1e-4:
            return "the gradients are not scaled: scale them in place, in shard.gradient"
        if abs(found / factor**2 - 1) < 1e-3:
            return "the gradients are scaled twice"
        return f"gradients are multiplied by {found:.5g}, expected max_norm / (norm + 1e-6)"
    return ""
