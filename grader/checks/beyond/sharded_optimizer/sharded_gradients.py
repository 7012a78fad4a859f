"""Judges the shards that a rank keeps: of the parameters at the start, and of the mean gradient after finish()."""

from itertools import product

import numpy as np

from grader.arithmetic import difference, matches
from grader.checks import reference
from grader.checks.beyond.sharded_optimizer.sharded_run import OptimizerRun
from grader.compare import forgotten_waits

FILE = "beyond/sharded_optimizer.py"
ROUNDED = 3000.0  # slack in which numbers that were rounded to bfloat16 lie


def check_shards(run: OptimizerRun) -> None:
    """Each rank holds its part of the values in float32; of float32 parameters it is a view."""
    for rank, value in enumerate(run.result.values):
        own = value["own"]
        for i, told in enumerate(own["shards"]):
            right = run.setting.flat(run.buckets[i], run.initial, run.n)
            where = f"{run.n} ranks, bucket {i}, rank {rank}: "
            if words := _wrong_shard(told, right, rank):
                run.grade.fail(where + words)
            _check_view(run, i, rank, own["raised"], where)


def _wrong_shard(told: dict, right: np.ndarray, rank: int) -> str:
    if "type" in told:
        return f"expected a tensor as the values of the shard, got {told['type']}"
    if told["dtype"] != "float32":
        return f"the values of the shard are in {told['dtype']}, expected float32, also for bfloat16 parameters"
    values = told["values"]
    if np.array_equal(values, right[rank]):
        return ""
    words = difference("the shard", values, right[rank])
    for other, row in enumerate(right):
        if np.array_equal(values, row) and other != rank:
            return f"the values are those of rank {other}'s shard: rank r owns the elements r L to (r+1) L; {words}"
    return f"the values are not this rank's part of flat.values; {words}"


def _check_view(run: OptimizerRun, i: int, rank: int, raised: list, where: str) -> None:
    """What is added to a float32 shard is added to the parameters, and not what is added to a copy."""
    bucket = run.buckets[i]
    if run.setting.dtype(bucket[0]) != "float32":
        return
    right = run.setting.flat(bucket, run.initial, run.n)
    right[rank] += 1
    sizes = [run.initial[k].size for k in bucket]
    expected = right.ravel()[: sum(sizes)]
    got = np.concatenate([np.ravel(raised[k]) for k in bucket])
    if not np.allclose(got, expected, atol=1e-5):
        run.grade.fail(
            f"{where}what changes in the shard does not change the parameters: the shard of float32 parameters must be "
            "a view of flat.values, not a copy"
        )


def check_means(run: OptimizerRun) -> None:
    """After each finish() every shard has the mean of what all ranks have computed in this step so far."""
    for rank, value in enumerate(run.result.values):
        for finish in value["finishes"]:
            step, micro = finish["step"], finish["micro"]
            for i, told in enumerate(finish["gradients"]):
                _check_mean(run, rank, step, micro, i, told)


def _check_mean(run: OptimizerRun, rank: int, step: int, micro: int, i: int, told: dict) -> None:
    where = f"step {step}, micro-batch {micro}, {run.n} ranks: the gradient of rank {rank}'s shard of bucket {i}"
    right = run.mean(step, micro, i)
    if "type" in told:
        run.grade.fail(f"{where}: expected a tensor in shard.gradient after receive(), got {told['type']}")
    got, total = told["values"], float(np.linalg.norm(right))
    if reference.close(got, right[rank], total) and told["dtype"] == "float32":
        return
    cause = forgotten_waits(run.result) or _name(run, rank, (step, micro), i, told)
    words = difference("mean of all ranks", got, right[rank])
    if reference.close(got, right[rank], total):
        words = f"expected float32, got {told['dtype']}"
    run.grade.fail(f"{cause}\n{where}: {words}" if cause else f"{where}: {words}")


def _name(run: OptimizerRun, rank: int, place: tuple[int, int], i: int, told: dict) -> str:
    """The mistake that leaves this in a shard's gradient; "" if it is no known one."""
    got, right, n = told["values"], run.mean(*place, i), run.n
    if told["dtype"] == "bfloat16" or (np.shape(got) != right[rank].shape and np.size(got) == right.size):
        if np.size(got) == right.size:
            return "shard.gradient has the gradients of all shards: a rank needs only its own shard"
        return "shard.gradient is in bfloat16: add the gradients of bfloat16 parameters in float32"
    if np.shape(got) != right[rank].shape:
        return ""
    with np.errstate(all="ignore"):
        for candidate, words in _candidates(run, rank, place, i):
            if matches(got, candidate) and np.any(candidate):
                return words
    if run.setting.dtype(run.buckets[i][0]) == "bfloat16" and reference.close(got, right[rank], 0.0, ROUNDED):
        return (
            "shard.gradient is rounded to bfloat16: add the gradients of bfloat16 parameters in float32. A "
            "reduce_scatter adds in the dtype of its tensors"
        )
    if not np.any(got) and np.any(right[rank]):
        return "shard.gradient is zero: send each bucket once, when its gradients are ready"
    return _ratio(got, right[rank], n) or _mixed_shards(run, rank, place, i, got)


def _candidates(run: OptimizerRun, rank: int, place: tuple[int, int], i: int) -> list[tuple[np.ndarray, str]]:
    """(value, words): in the order in which they are asked."""
    step, micro = place
    n, right = run.n, run.mean(step, micro, i)
    sent = [run.rows(r, step, micro, i) for r in range(n)]  # [from rank][shard]
    here = np.mean(sent, axis=0)
    first, added = run.mean(step, 0, i), 0 if run.setting.stage == 1 else micro
    crossed = np.stack([rows[rank] for rows in sent]).reshape(-1, n).mean(axis=1)
    found = []
    if n > 1:
        found += [
            (right[rank] * n, f"shard.gradient is {n} times the mean: divide the sum by the number of ranks"),
            (right[rank] / n, "the sum was divided by the number of ranks twice"),
            *[(right[j], f"shard.gradient is the gradient of rank {j}'s shard") for j in range(n) if j != rank],
            (sent[rank][rank], "shard.gradient is this rank's own gradient: nothing of the other ranks is in it"),
            (
                sent[rank][rank] / n,
                "shard.gradient is this rank's own gradient, divided: nothing of the other ranks is in it",
            ),
            *[
                (sent[j][rank], f"shard.gradient is only rank {j}'s gradient: add the rows of all ranks")
                for j in range(n)
            ],
            (crossed, "elements of different ranks are mixed: the received tensor is N rows of L, one per rank"),
        ]
    if added:
        found += [
            (
                here[rank],
                "shard.gradient is only the gradient of the last micro-batch: add it to that of the earlier ones",
            ),
            (first[rank], "shard.gradient is only the gradient of the first micro-batch: add the later ones"),
        ]
    for earlier in range(step):
        before = run.mean(earlier, len(run.setting.uses[earlier]) - 1, i)
        found += [
            (before[rank], f"shard.gradient is still the gradient of step {earlier}"),
            (right[rank] + before[rank], f"the gradient of step {earlier} is added to shard.gradient"),
        ]
    return found


def _mixed_shards(run: OptimizerRun, rank: int, place: tuple[int, int], i: int, got: np.ndarray) -> str:
    """Whether the ranks' gradients of different shards were added."""
    sent = [run.rows(r, *place, i) for r in range(run.n)]
    for shards in product(range(run.n), repeat=run.n):
        mean = np.mean([rows[shard] for rows, shard in zip(sent, shards, strict=True)], axis=0)
        if matches(got, mean) and np.any(mean):
            parts = ", ".join(f"rank {r}'s of shard {shard}" for r, shard in enumerate(shards))
            return f"gradients of different shards are added up, {parts}: all ranks send the shards in the same order"
    return ""


def _ratio(got: np.ndarray, right: np.ndarray, n: int) -> str:
    if not np.any(right):
        return ""
    factor = float(np.vdot(right, got) / np.vdot(right, right))
    known = {1 / n**2: "shard.gradient was divided by the number of ranks squared"}
    for value, words in known.items():
        if n > 1 and abs(factor / value - 1) < 1e-4 and matches(got, right * factor):
            return words
    return f"shard.gradient is {factor:.3f} times the mean" if factor and matches(got, right * factor) else ""


def check_frozen(run: OptimizerRun) -> None:
    """Frozen parameters do not change and have no gradient; nor do others change before step()."""
    for rank, value in enumerate(run.result.values):
        for k, (got, right) in enumerate(zip(value["parameters"], run.initial, strict=True)):
            if not np.array_equal(got, right):
                run.grade.fail(f"parameter {k} itself changed on rank {rank}: only step() changes parameters")


def check_given_up(run: OptimizerRun) -> None:
    """After finish() no parameter has a gradient."""
    for rank, value in enumerate(run.result.values):
        for finish in value["finishes"]:
            if left := finish["left"]:
                run.grade.fail(f"parameter {left[0]} still has a gradient on rank {rank} after finish()")
