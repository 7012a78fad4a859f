"""Judges the buckets of a gradient reducer, and the order that all ranks agree on."""

import numpy as np

from grader.grading import Grade
from grader.ranks.phrases import short
from grader.wire import drawn

FILE = "beyond/overlap.py"
BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
Case = dict  # sizes (numbers of elements), dtypes, bucket_bytes


def cases(grade: Grade) -> list[Case]:
    """An exact fit and one byte less, parameters above the limit, several dtypes, none at all, and drawn ones."""
    draw = drawn.generator(grade.seed, 12)
    sizes = [int(size) for size in draw.integers(1, 60, 12)]
    mixed = [str(dtype) for dtype in draw.choice(list(BYTES), 12)]
    fit = 4 * sum(sizes[:3])
    found = [
        (sizes, "float32", fit),
        (sizes, "float32", fit - 1),
        ([50, 2, 60, 70, 2], "float32", 40),
        ([], "float32", 40),
    ]
    found += [(sizes, "float64", 8 * 70), ([5, 5, 5], "bfloat16", 20)]
    listed = [{"sizes": s, "dtypes": [dtype] * len(s), "bucket_bytes": limit} for s, dtype, limit in found]
    small = {"sizes": [2, 3, 2, 4], "dtypes": ["float32", "float64", "bfloat16", "float32"], "bucket_bytes": 200}
    return [
        *listed,
        small,
        {"sizes": sizes, "dtypes": mixed, "bucket_bytes": 200},
    ]  # of `small`, all would fit into one


def check_buckets(grade: Grade) -> None:
    """Every parameter is in one bucket, in order; a bucket has one dtype and as many as it may hold."""
    given = cases(grade)
    (made,) = grade.values("grader.probes.beyond.overlap:buckets", 1, each=[given])
    for case, buckets in zip(given, made, strict=True):
        nbytes = [size * BYTES[dtype] for size, dtype in zip(case["sizes"], case["dtypes"], strict=True)]
        kinds = case["dtypes"] if len(set(case["dtypes"])) > 1 else case["dtypes"][:1]
        where = f"parameters of {short(nbytes, 120)} bytes ({', '.join(kinds)}), bucket_bytes={case['bucket_bytes']}: "
        if words := _wrong(case, buckets, nbytes):
            grade.fail(where + words + f"; got the buckets {short(buckets, 200)}")


def _wrong(case: Case, buckets: list[list[int]], nbytes: list[int]) -> str:
    limit, dtypes = case["bucket_bytes"], case["dtypes"]
    flat = [k for bucket in buckets for k in bucket]
    if [] in buckets:
        return "a bucket is empty: start a new bucket only when you have a parameter to put into it"
    if lost := sorted(set(range(len(nbytes))) - set(flat)):
        last = "; is the last bucket kept?" if lost == list(range(lost[0], len(nbytes))) else ""
        return f"parameter {lost[0]} is in no bucket{last}"
    if len(flat) > len(set(flat)):
        return "a parameter is in two buckets"
    if flat != sorted(flat):
        return "the order of the parameters has changed"
    for i, bucket in enumerate(buckets):
        if len({dtypes[k] for k in bucket}) > 1:
            return f"bucket {i} has several dtypes: a message can have only one"
        size = sum(nbytes[k] for k in bucket)
        if size > limit and len(bucket) > 1:
            elements = sum(case["sizes"][k] for k in bucket)
            as_if_float32 = size > 4 * elements and 4 * elements <= limit
            advice = "check for room before you add a parameter"
            if as_if_float32 or size - nbytes[bucket[-1]] > limit:
                advice = "sizes are bytes (parameter.nbytes); an element has 2, 4 or 8, and not 1"
            return f"bucket {i} holds {size} bytes, more than bucket_bytes: {advice}"
        if not i or dtypes[buckets[i - 1][-1]] != dtypes[bucket[0]]:
            continue
        before = sum(nbytes[k] for k in buckets[i - 1])
        if before + nbytes[bucket[0]] <= limit:
            exactly = " exactly" if before + nbytes[bucket[0]] == limit else ""
            return (
                f"parameter {bucket[0]} still fits{exactly} into bucket {i - 1}, but starts a new one: sizes are bytes "
                "(nbytes), and the limit itself is allowed"
            )
    return ""


def check_order(grade: Grade) -> None:
    """All ranks have rank 0's order, which it alone knows; parameters that were not ready there come last."""
    for world_size in (3, 2, 4, 1):
        draw = drawn.generator(grade.seed, 13, world_size)
        each = [_ready(draw, rank) for rank in range(world_size)]
        got = grade.values("grader.probes.beyond.overlap:order", world_size, each=each)
        for i, first in enumerate(each[0]):
            for rank in range(world_size):
                if words := _wrong_order(got[rank][i], got[0][i], first, each[rank][i]["ready"], rank):
                    ready = f"{first['count']} parameters, ready on rank 0: {short(first['ready'], 100)}"
                    result = short(got[rank][i], 100)
                    grade.fail(f"{world_size} ranks, {ready}: on rank {rank} {words}; got {result}")


def _ready(draw: np.random.Generator, rank: int) -> list[dict]:
    """All of 9 in some order, 5 of them on rank 0 and others elsewhere, none at all on rank 0; all but 10 of 300."""
    whole, parts = draw.permutation(9).tolist(), [5, 3 + rank, 0 if rank == 0 else 4]
    some = [draw.permutation(9)[:count].tolist() for count in parts]
    many = draw.permutation(300)[:290].tolist()  # more than a byte can number, as in every real model
    return [*({"count": 9, "ready": ready} for ready in (whole, *some)), {"count": 300, "ready": many}]


def _wrong_order(got: list[int] | str, rank_0: list[int] | str, first: dict, own: list[int], rank: int) -> str:
    if isinstance(got, str):
        return f"expected a list of all parameters, got {got}"
    ready = first["ready"]
    if sorted(got) != list(range(first["count"])):
        return "expected every parameter once: those that were not ready come last"
    if got[: len(ready)] == ready:
        return "" if got == rank_0 else "parameters that were not ready are in a different order than on rank 0"
    if rank and own and got[: len(own)] == own:
        return "the order is the rank's own, not rank 0's"
    if got == list(range(first["count"])):
        return "the order is that of `parameters`, not that in which gradients became ready"
    if got[-len(ready) :] == ready:
        return "parameters that were not ready come first: put them last"
    return "the order is not that of rank 0"
