"""The gradient reducer, b.3: buckets, and the order of parameters on which all ranks agree."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.phrases import short
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.toy_shared import BYTES

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, nn, torch

graded = pytest.mark.graded
Case = Fields  # for buckets: sizes (numbers of elements), dtypes, bucket_bytes; for an order: count, ready


# --- what a rank does ---


@in_rank
def make_buckets(context: Context, lesson: ModuleType, inputs: list[Fields]) -> object:
    """Yield the buckets of each case, with a number for each parameter; -1 for anything else."""
    for case in inputs:
        sizes = zip(case["sizes"], case["dtypes"], strict=True)
        parameters = [nn.Parameter(torch.zeros(size, dtype=getattr(torch, dtype))) for size, dtype in sizes]
        numbers = {id(parameter): k for k, parameter in enumerate(parameters)}
        given = list(parameters)
        buckets = lesson.make_buckets(given, case["bucket_bytes"])
        yield {
            "buckets": [[numbers.get(id(parameter), -1) for parameter in bucket] for bucket in buckets],
            "kept": [*map(id, given)] == [*map(id, parameters)],
        }


@in_rank
def agree_on_order(context: Context, lesson: ModuleType, inputs: list[Fields]) -> object:
    """Yield the returned order of each case as numbers of parameters; the class of the result if it is no list."""
    for case in inputs:
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(case["count"])]
        numbers = {id(parameter): k for k, parameter in enumerate(parameters)}
        given = list(parameters)
        order = lesson.agree_on_order(dict.fromkeys(parameters[k] for k in case["ready"]), given)
        is_list = isinstance(order, list | tuple)
        yield {
            "order": [numbers.get(id(parameter), -1) for parameter in order] if is_list else type(order).__name__,
            "kept": [*map(id, given)] == [*map(id, parameters)],
        }


# --- buckets ---


def size_cases(grade: Grade) -> list[Case]:
    """Return cases in float32: an exact fit and one byte less, parameters above the limit, none at all."""
    sizes = drawn.generator(grade.seed, 12).integers(1, 60, 12).tolist()
    fit = 4 * sum(sizes[:3])
    cases: tuple[tuple[list[int], int], ...] = ((sizes, fit), (sizes, fit - 1), ([50, 2, 60, 70, 2], 40), ([], 40))
    return [{"sizes": own, "dtypes": ["float32"] * len(own), "bucket_bytes": limit} for own, limit in cases]


def dtype_cases(grade: Grade) -> list[Case]:
    """Return cases in other dtypes, and in several; in the last one, all parameters would fit into one bucket."""
    draw = drawn.generator(grade.seed, 18)
    sizes, several = draw.integers(1, 60, 12).tolist(), draw.choice(list(BYTES), 12).tolist()
    cases = (
        (sizes, ["float64"] * 12, 8 * 70), ([5, 5, 5], ["bfloat16"] * 3, 20), (sizes, several, 200),
        ([2, 3, 2, 4], ["float32", "float64", "bfloat16", "float32"], 200),
    )  # fmt: skip
    return [{"sizes": own, "dtypes": dtypes, "bucket_bytes": limit} for own, dtypes, limit in cases]


def check_buckets(grade: Grade, cases: list[Case]) -> None:
    """Check that parameters are in buckets in order, and that a bucket has one dtype and is as full as it may be."""
    result = run(grade, make_buckets, [cases])
    for case, left in zip(cases, result.values[0], strict=True):
        buckets = left["buckets"]
        nbytes = [size * BYTES[dtype] for size, dtype in zip(case["sizes"], case["dtypes"], strict=True)]
        dtypes = ", ".join(case["dtypes"] if len(set(case["dtypes"])) > 1 else case["dtypes"][:1])
        if mistake := mistake_in_buckets(case, buckets, nbytes):
            given = f"parameters of {short(nbytes, 120)} bytes ({dtypes}), bucket_bytes={case['bucket_bytes']}"
            grade.fail(f"{given}: {mistake}; got the buckets {short(buckets, 200)}")
        if not left["kept"]:
            grade.fail("make_buckets changes the list `order`: it belongs to the caller")


def mistake_in_buckets(case: Case, buckets: list[list[int]], nbytes: list[int]) -> str:
    """Say what is wrong with the buckets; "" if nothing is."""
    together = [k for bucket in buckets for k in bucket]
    if [] in buckets:
        return "a bucket is empty: start a new bucket only when you have a parameter to put into it"
    if lost := sorted(set(range(len(nbytes))) - set(together)):
        last = "; is the last bucket kept?" if lost[-1] == len(nbytes) - 1 else ""
        return f"parameter {lost[0]} is in no bucket{last}"
    if together != sorted(set(together)):
        return "the order of the parameters has changed, or a parameter is in two buckets"
    for i, bucket in enumerate(buckets):
        if len({case["dtypes"][k] for k in bucket}) > 1:
            return f"bucket {i} has several dtypes: a message can have only one"
        before = buckets[i - 1] if i else []
        if words := mistake_in_size(case, i, bucket, before, nbytes):
            return words
    return ""


def mistake_in_size(case: Case, i: int, bucket: list[int], before: list[int], nbytes: list[int]) -> str:
    """Say whether bucket i is too large, or its first parameter fits into the bucket before it; "" if neither."""
    dtype, limit, size = case["dtypes"][bucket[0]], case["bucket_bytes"], sum(nbytes[k] for k in bucket)
    if size > limit and len(bucket) > 1:
        advice = "check for room before you add a parameter"
        if size - nbytes[bucket[-1]] > limit:
            advice = f"sizes are bytes (parameter.nbytes): an element of {dtype} has {BYTES[dtype]}"
        return f"bucket {i} holds {size} bytes, more than bucket_bytes: {advice}"
    if not before or case["dtypes"][before[0]] != case["dtypes"][bucket[0]]:
        return ""
    together = sum(nbytes[k] for k in [*before, bucket[0]])
    if together <= limit:
        exactly = " exactly" if together == limit else ""
        words = "but starts a new one: count the bytes (nbytes) of each bucket from 0; the limit itself is allowed"
        return f"parameter {bucket[0]} still fits{exactly} into bucket {i - 1}, {words}"
    return ""


# --- the order ---


def ready_lists(draw: np.random.Generator, rank: int) -> list[Case]:
    """Return a rank's ready parameters in five cases: all of 9; 5; 3 or more; 4, but none on rank 0; 290 of 300."""
    lists = [draw.permutation(9)[:count].tolist() for count in (9, 5, 3 + rank, 4 if rank else 0)]
    many = draw.permutation(300)[:290].tolist()  # more than a byte can number, as in every real model
    return [*({"count": 9, "ready": ready} for ready in lists), {"count": 300, "ready": many}]


def check_order(grade: Grade, ranks: int) -> None:
    """Check that all ranks have rank 0's order, with parameters that were not ready on rank 0 at the end."""
    draw = drawn.generator(grade.seed, 13, ranks)
    inputs = [ready_lists(draw, rank) for rank in range(ranks)]
    result = run(grade, agree_on_order, inputs)
    for number, first in enumerate(inputs[0]):
        ready, everything = first["ready"], list(range(first["count"]))
        for rank, left in enumerate(values[number] for values in result.values):
            got = left["order"]
            where = f"{ranks} ranks, {len(everything)} parameters, ready on rank 0: {short(ready, 100)}: rank {rank} "
            if isinstance(got, str) or sorted(got) != everything:
                words = "expected every parameter once, as a list: those that were not ready come last"
                own_rest = [k for k in everything if k not in inputs[rank][number]["ready"]]
                if rank and got == [*ready, *own_rest]:
                    words = "those at the end were not ready on this rank: add those that rank 0's order lacks"
                grade.fail(f"{where}has {short(got, 100)}; {words}")
            own, first_got = inputs[rank][number]["ready"], got[: len(ready)]
            mistakes = {
                "has {got}: the order is the rank's own, not rank 0's: use what the broadcast has brought":
                    first_got if own and got[: len(own)] == own else None,
                "has {got}: the order is that of `parameters`, not that in which gradients became ready":
                    everything[: len(ready)],
                "has {got}: parameters that were not ready come first: put them last":
                    first_got if got[-len(ready) :] == ready else None,
                "has {got}: number k is the place of parameter k in the order; expected the parameter at place k":
                    first_got if [got[k] for k in ready] == list(range(len(ready))) else None,
            }  # fmt: skip
            differs = "has parameters that were not ready in a different order than rank 0"
            got_parts = {"ready": first_got, "rest": got, "kept": left["kept"]}
            expected = {
                "ready": Expected(ready, "has {got}: the order is not that of rank 0", mistakes=mistakes),
                "rest": Expected(result.values[0][number]["order"], differs),
                "kept": Expected(True, "changes the list `parameters`, which belongs to the caller"),
            }
            check(grade, where, got_parts, expected, result)


# --- the graded tests ---


@graded("b.3")
def test_buckets_are_filled_in_order_up_to_their_size(grade: Grade) -> None:
    check_buckets(grade, size_cases(grade))


@graded("b.3")
def test_buckets_have_one_dtype_and_count_its_bytes(grade: Grade) -> None:
    check_buckets(grade, dtype_cases(grade))


@graded("b.3")
def test_all_ranks_agree_on_rank_0_s_order(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
    for ranks in (3, 2, 4, 1):
        check_order(grade, ranks)
