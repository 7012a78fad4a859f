"""The ring: b.1 reduce_scatter and b.2 all_gather, made of send and recv.

The tests judge what every rank holds at the end, and every message of every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from grader.arithmetic import EXACT, Tolerance
from grader.call_checks import ExpectedCall, all_calls, check_calls, phases, why_stuck
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.request import RankFunction
from grader.wire.values import Fields
from tests.gradients import test_averaging as averaging

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, tensors_of, torch

graded = pytest.mark.graded
FILE = "beyond/ring.py"
ADVICE = "send one chunk in each of N-1 rounds, and use only send and recv (or isend and irecv)"
EVEN = ((12, "float32"),)
PLAIN = ((12, "float32"), (97, "float32"))
ODD = ((2, "float32"), (5, "float64"), (1, "float32"), (41, "bfloat16"), (10, "int64"))
LARGE = ((700_001, "float32"), (0, "float32"), (7, "float16"))  # 2.8 MB
ROUNDING = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 0.03, "float16": 0.004, "int64": 0.0}
Cases = tuple[tuple[int, str], ...]  # (length, dtype)


# --- what a rank does ---


@in_rank
def reduce_scatter(context: Context, lesson: ModuleType, inputs: list[torch.Tensor]) -> object:
    """Yield the chunks that the student's function returns in each case, and the tensor itself afterwards."""
    for tensor, dtype in zip(inputs, context.arguments["dtypes"], strict=True):
        flat = tensor.to(getattr(torch, dtype)).clone()
        context.event("case")
        chunks = lesson.reduce_scatter(flat)
        yield {"chunks": tensors_of(chunks), "flat": copy_of(flat)}


@in_rank
def all_gather(context: Context, lesson: ModuleType, inputs: list[list[torch.Tensor]]) -> object:
    """Yield the chunks of each case as the student's function leaves them."""
    for tensors, dtype in zip(inputs, context.arguments["dtypes"], strict=True):
        chunks = [tensor.to(getattr(torch, dtype)).clone() for tensor in tensors]
        context.event("case")
        lesson.all_gather(list(chunks))
        yield [copy_of(chunk) for chunk in chunks]


# --- inputs and messages ---


def draw(seed: int, ranks: int, cases: Cases) -> list[list[np.ndarray]]:
    """Draw the tensors [rank][case]; in half precision whole numbers, so that sums are exact.

    Of several cases, the last rank has an inf in the first one, and zeros in the last one.
    """

    def one(rank: int, case: int, length: int, dtype: str) -> np.ndarray:
        draw = drawn.generator(seed, 11, rank, case)
        if dtype in ("float32", "float64"):
            return draw.normal(size=length).astype(dtype)
        return draw.integers(-8, 9, length).astype("int64" if dtype == "int64" else "float32")

    tensors = [[one(rank, number, *case) for number, case in enumerate(cases)] for rank in range(ranks)]
    if len(cases) > 1:
        tensors[-1][0][0] = np.inf
        tensors[-1][-1] *= 0
    return tensors


def slices(sizes: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *sizes])
    return [slice(begin, end) for begin, end in pairwise(ends)]


def even(length: int, parts: int) -> list[int]:
    """Return lengths that differ by at most one, the longer ones first."""
    shorter, longer_ones = divmod(length, parts)
    return [shorter + 1] * longer_ones + [shorter] * (parts - longer_ones)


def exchanged(grade: Grade, function: RankFunction, cases: Cases, inputs: Sequence[object]) -> Result:
    """Run one half of the ring. Fail for torch's own collectives, which give the same values."""
    ranks = list(range(len(inputs)))
    right, left = ranks[1:] + ranks[:1], ranks[-1:] + ranks[:-1]
    peers = {
        "send": [(rank, "its right neighbour") for rank in right],
        "recv": [(rank, "its left neighbour") for rank in left],
    }
    dtypes = [dtype for _, dtype in cases]
    result = run(grade, function, inputs, why_stuck=partial(why_stuck, peers=peers), dtypes=dtypes)
    for call in all_calls(result):
        if call.name not in ("init_process_group", "barrier", "send", "recv"):
            grade.fail(f"rank {call.rank} calls {call.name} ({call.where}): {ADVICE}")
    return result


def check_rounds(
    grade: Grade,
    result: Result,
    case: int,
    where: str,
    first: int,
    values: Callable[[int, int, list[int]], np.ndarray],
    what: str,
) -> None:
    """Check every message. Chunk k starts `first` ranks to the right of rank k, and each rank passes it to the right.

    `values(case, chunk, way)`: what a rank sends, if `way` lists the ranks that the chunk has visited, up to this rank.
    """
    ranks = list(range(len(result.ranks)))
    sends: list[list[ExpectedCall]] = [[] for _ in ranks]
    for round_ in ranks[:-1]:
        for chunk in ranks:
            way = [(chunk + first + hop) % len(ranks) for hop in range(round_ + 1)]
            sender = way[-1]
            receiver, payload = (sender + 1) % len(ranks), values(case, chunk, way)
            message = ExpectedCall("send", receiver, "its right neighbour", payload, f"chunk {chunk} with {what}")
            sends[sender].append(message)
    for rank in ranks:
        receives = [ExpectedCall("recv", ranks[rank - 1], "its left neighbour")] * len(sends[rank])
        check_calls(grade, where, rank, phases(result, rank)[case].calls, sends[rank] + receives, ADVICE)


# --- b.1 ---


def check_sums(grade: Grade, ranks: int, cases: Cases) -> Result:
    """Check that chunks[rank] is the sum over all ranks, in flat itself, and that the chunks cut flat evenly."""
    inputs = draw(grade.seed, ranks, cases)
    result = exchanged(grade, reduce_scatter, cases, inputs)
    for case, (length, dtype) in enumerate(cases):
        whole = np.asarray(np.sum([own[case] for own in inputs], axis=0, dtype=np.float64))
        for rank, left in enumerate(values[case] for values in result.values):
            where, chunks = f"{ranks} ranks, {length} elements of {dtype}", left["chunks"]
            if isinstance(chunks, str):
                grade.fail(observed=f"{where}: expected a list of {ranks} chunks, got {chunks}")
            sizes = [chunk.size for chunk in chunks]
            if sorted(sizes) != sorted(even(length, ranks)):
                rounded_up = set(sizes[:-1]) == {math.ceil(length / ranks)}
                cause = "; torch.chunk rounds up, and may give fewer chunks" if rounded_up else ""
                grade.fail(f"{where}: expected chunks of lengths that differ by at most one, got {sizes}{cause}")
            cut = slices(sizes)
            parts = [np.asarray(own[case][cut[rank]], np.float64) for own in inputs]
            others = [k for k in range(ranks) if k != rank and sizes[k]]
            complete = [k for k in others if np.allclose(chunks[k], whole[cut[k]], 1e-4, 1e-6)]
            tolerance = Tolerance(limit=ROUNDING[dtype] * (1 + np.abs(whole[cut[rank]])))
            expected = {
                f"chunks[{rank}]": Expected(
                    whole[cut[rank]], "the partial sums in the messages are wrong", tolerance=tolerance,
                    mistakes=mistakes_in_sum(rank, parts, chunks[rank], complete),
                ),
                "flat": Expected(
                    whole[cut[rank]], "the chunks must be views of flat (split makes some), and the sum must be added "
                    "in place (+=)", f"chunks[{rank}] is right, but not its part of flat", tolerance=tolerance,
                ),
            }  # fmt: skip
            got = {f"chunks[{rank}]": chunks[rank], "flat": left["flat"][cut[rank]]}
            check(grade, f"{where}, rank {rank}: ", got, expected, result)
    return result


def check_rounds_of_sums(grade: Grade, ranks: int) -> None:
    """Check the partial sum in every message of reduce_scatter."""
    inputs, result = draw(grade.seed, ranks, PLAIN), check_sums(grade, ranks, PLAIN)
    cuts = [slices([chunk.size for chunk in chunks["chunks"]]) for chunks in result.values[0]]

    def partial_sum(case: int, chunk: int, way: list[int]) -> np.ndarray:
        return np.asarray(np.sum([inputs[rank][case][cuts[case][chunk]] for rank in way], axis=0, dtype=np.float64))

    for case, (length, _) in enumerate(PLAIN):
        where = f"reduce_scatter of {length} elements on {ranks} ranks"
        check_rounds(grade, result, case, where, 1, partial_sum, "its partial sum")


def mistakes_in_sum(rank: int, parts: list[np.ndarray], got: np.ndarray, complete: list[int]) -> Fields:
    """Return mistake -> what it leaves in place of the sum of `parts`. `complete`: the other chunks that are right."""
    total = np.sum(parts, axis=0)
    instead = {f"rank {rank} completes chunk {k} instead of its own: first send your left neighbour's own chunk": got
               for k in complete}  # fmt: skip
    return instead | {
        "the chunk holds only this rank's own part: add what you receive, in each of N-1 rounds": parts[rank],
        "{name} is the mean; the ring gives the sum": total / len(parts),
        "the rank's own part is in the sum twice: N ranks need N-1 rounds, one alone needs none": total + parts[rank],
        **{
            f"rank {k}'s part has replaced what was there, instead of being added": part for k, part in enumerate(parts)
        },
    }


@graded("b.1")
def test_reduce_scatter_leaves_the_sum_of_its_own_chunk_on_each_rank(grade: Grade) -> None:
    for ranks in (3, 2, 4):
        check_sums(grade, ranks, EVEN)


@graded("b.1")
def test_reduce_scatter_takes_any_length_and_dtype_and_one_rank(grade: Grade) -> None:
    for ranks, cases in ((4, PLAIN), (3, ODD), (2, LARGE), (1, PLAIN)):
        check_sums(grade, ranks, cases)


@graded("b.1")
def test_each_round_of_reduce_scatter_sends_one_chunk_to_the_right(grade: Grade) -> None:
    for ranks in (3, 4):
        check_rounds_of_sums(grade, ranks)


@graded("b.1", absence=True)
def test_the_ring_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(FILE)


# --- b.2 ---


def check_gathered(grade: Grade, ranks: int, cases: Cases, rounds: bool = False) -> None:
    """Check that every rank has every rank's own chunk, bit by bit, in the tensors that it passed."""
    inputs = draw(grade.seed, ranks, cases)
    cuts = [slices(even(length, ranks)) for length, _ in cases]
    before = [[[own[case][part] for part in cut] for case, cut in enumerate(cuts)] for own in inputs]
    result = exchanged(grade, all_gather, cases, before)
    for case, (length, dtype) in enumerate(cases):
        for rank, left in enumerate(values[case] for values in result.values):
            for k in range(ranks):
                versions = [own[case][k].astype(np.float64) for own in before]
                passed = versions[k : rank + 1] if k <= rank else versions[k:] + versions[: rank + 1]
                mistakes = {
                    "the chunk was not replaced: receive every chunk into its own memory, in N-1 rounds (assigning to "
                    "a variable does not change a tensor)": versions[rank],
                    "the received values are added to the chunk: here they must replace it": np.sum(passed, axis=0),
                    **{
                        f"{{name}} is rank {r}'s version of this chunk, not its owner's": one
                        for r, one in enumerate(versions)
                    },
                    **{
                        f"{{name}} is chunk {r}, not chunk {k}: send your own chunk only in round 0, and then always "
                        "the chunk that you received last": own[case][r]
                        for r, own in enumerate(before)
                        if own[case][r].shape == versions[k].shape
                    },
                }
                expected = {f"chunks[{k}]": Expected(versions[k], mistakes=mistakes, tolerance=EXACT)}
                where = f"{ranks} ranks, {length} elements of {dtype}, rank {rank}: "
                check(grade, where, {f"chunks[{k}]": left[k]}, expected, result)
        if rounds:
            where = f"all_gather of {length} elements on {ranks} ranks"
            check_rounds(grade, result, case, where, 0, lambda case, k, _: before[k][case][k], "its final values")


@graded("b.2")
def test_all_gather_copies_every_rank_s_own_chunk_to_all(grade: Grade) -> None:
    check_gathered(grade, 3, EVEN)
    for ranks in (3, 4):
        check_gathered(grade, ranks, PLAIN, rounds=True)
    for ranks, cases in ((3, ODD), (2, LARGE), (1, PLAIN)):
        check_gathered(grade, ranks, cases)


@graded("b.2", needs=["b.1"])
def test_the_whole_ring_averages_gradients_for_as_few_bytes_as_can_be(grade: Grade) -> None:
    """Both halves together average the gradients of a model, and each rank sends 2(N-1)/N S bytes."""
    for setting, ranks in ((averaging.ODD, 3), (averaging.PLAIN, 4), (averaging.LARGE, 2), (averaging.PLAIN, 1)):
        averaging.check_mean(grade, averaging.AVERAGE, setting, (ranks,))
        result, gradients = averaging.averaged(grade, averaging.AVERAGE, ranks, setting)
        sent = [sum(call.price for call in rank.calls if call.name == "send") for rank in result.ranks]
        size = 4 * sum(one.size for call in gradients[0] for one in call if one is not None)
        right = sum(size + size for _ in range(1, ranks))  # in each half, every chunk goes to all other ranks
        if sum(sent) != right or max(sent) > 1.1 * right / ranks + 100:
            got = [int(count) for count in sent]
            grade.fail(observed=f"{ranks} ranks send {got} bytes, expected {right} in all: 2(N-1)/N S each")
    for setting in (averaging.HALF, averaging.MIXED, averaging.INFINITE):
        averaging.check_mean(grade, averaging.AVERAGE, setting, (3,))
