"""Judges region 4.2, the expected traffic: beside what really moved, and by properties that every right answer has.

The lesson's formulas are not here, and no table of answers. Reference ranks move a tensor of a drawn size in a ring and
in a star, and the broker counts what each of them sends and receives. Twice the size moves twice the bytes.
"""

import itertools
import math
from collections import defaultdict

import numpy as np

from grader.grading import Grade
from grader.ranks.calls import Call

COUNTED = 7  # workers, at most, that really exchange something; with 7 of them no wrong factor looks like another
UNIT = 420  # elements: 2, 3, ... and 7 workers can share them
LARGER = (8, 40)  # workers in the cases that nobody counts
Bytes = dict[tuple[str, int, int], tuple[int, int]]  # (ring or star, workers, rank) -> sent, received
# (examples, batch of a worker, workers): wrong answers, and the mistakes that give them.
LAST, ALONE, PART, PADS = (
    "the last batch, which is not full, counts too",
    "that is the number for a single worker",
    "the number of iterations must be whole",
    "the sampler pads: if the examples do not divide evenly, every worker gets one more",
)
ITERATIONS: dict[tuple[int, int, int], dict[float, str]] = {
    (2490, 16, 4): {38: LAST, 156: ALONE, 38.9375: PART},
    (10, 1, 4): {2: PADS, 10: ALONE, 2.5: PART},
    (10, 3, 4): {0: LAST, 4: ALONE},
    (22, 7, 3): {1: LAST, 4: ALONE},
    (64, 16, 2): {4: ALONE},
    (3, 8, 4): {0: LAST},
    (17, 4, 1): {4: LAST, 4.25: PART},
    (100, 1, 8): {12: PADS, 100: ALONE, 12.5: PART},
}


class Counted:
    """What the broker has counted while reference ranks exchanged a tensor of `size` bytes."""

    def __init__(self, grade: Grade) -> None:
        draw = np.random.default_rng([grade.seed, COUNTED])
        each = draw.normal(size=(COUNTED, UNIT * int(draw.integers(1, 5))))
        self.size = each[0].nbytes
        result = grade.session.run("grader.probes.moved_bytes:moves", COUNTED, {"each": list(each)})
        totals: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
        for rank, sums in zip(result.ranks, result.values, strict=True):
            exchanges = itertools.product(range(max(2, rank.rank + 1), COUNTED + 1), ("ring", "star"))
            for (workers, _), found in zip(exchanges, sums, strict=True):
                assert np.allclose(found, each[:workers].sum(axis=0)), "the reference moves what it must"
            place = ("", 0, rank.rank)
            for event in rank.events:
                if not isinstance(event, Call):
                    place = (event.name, int(event.data["workers"]), rank.rank)
                elif event.point_to_point:
                    totals[place][0] += event.sent
                    totals[place][1] += event.received
        self.bytes: Bytes = {place: (sent, received) for place, (sent, received) in totals.items()}

    def of(self, name: str, workers: int, rank: int, size: int) -> tuple[float, float]:
        """Bytes sent and received for a tensor of another size: they grow with it."""
        sent, received = self.bytes[name, workers, rank]
        return sent * size / self.size, received * size / self.size


def check_gradient_bytes(grade: Grade) -> None:
    """Shared tensors once, frozen and unused ones not at all, and the dtype's size."""
    count: list[int] = []
    while len({*count[1:5:2], *count[4:5], sum(count[1:5:2])}) < 4:  # so that no wrong sum looks like another
        shapes = [[int(n) for n in grade.draw.integers(2, 9, size=2)] for _ in range(5)] + [[7], [640, 1000], []]
        count = [int(np.prod(shape)) for shape in shapes]
    setting = {"shapes": shapes, "frozen": [1], "without": [3], "tied": [4]}
    widths = {"fp32": 4, "bf16": 2, "fp16": 2}
    (found,) = grade.values("grader.probes.traffic:gradient_bytes", 1, dtypes=[*widths], **setting)
    for (dtype, size), got in zip(widths.items(), found, strict=True):
        expected = size * (count[0] + count[2] + sum(count[4:]))
        causes = {
            "the tensor that two layers share is counted twice": expected + size * count[4],
            "the frozen tensor is counted, but never sent": expected + size * count[1],
            "the unused tensor, whose gradient is None, is counted": expected + size * count[3],
            "frozen and unused tensors are counted, but never sent": expected + size * (count[1] + count[3]),
            "those are elements, not bytes": expected / size,
            "those are bits": 8 * expected,
            f"an element of {dtype} takes {size} bytes, not 4": expected * 4 / size,
        }
        if got != expected:
            cause = next((f": {words}" for words, value in causes.items() if value == got), "")
            grade.fail(f"gradient_bytes as {dtype}: expected {expected}, got {got:.0f}{cause}")


def check_all_reduce(grade: Grade) -> None:
    """What a ring sends and receives, for several sizes and numbers of workers."""
    counted, draw = Counted(grade), grade.draw
    workers = [COUNTED, *range(2, COUNTED)]
    cases = [[int(draw.integers(10_000, 900_000)), n] for n in workers] + [[counted.size, n] for n in workers]
    larger = sorted(int(n) for n in draw.choice(np.arange(*LARGER), 6, replace=False))
    size = UNIT * int(draw.integers(100, 900))
    found = _traffic(grade, "all_reduce_traffic", cases + [[size, n] for n in [COUNTED, *larger]])
    for (asked, n), got in zip(cases, found, strict=False):
        right = counted.of("ring", n, 0, asked)
        causes = {
            "that is the tensor itself, without the factor of the ring": asked,
            "that is half: every piece travels around the ring twice, to be summed and to be distributed": right[0] / 2,
            "that is the sum over all workers; return the bytes of one worker": right[0] * n,
            "that is what a root sends if it sends the sum to every worker": counted.of("star", n, 0, asked)[0],
            "that is twice the tensor, which a ring approaches but never reaches": 2 * asked,
            "that is sent plus received": 2 * right[0],
            "those are bits": 8 * right[0],
        }
        _compare(grade, f"all_reduce of {asked} bytes on {n} workers", got, right, causes)
    for (n, got), (m, more) in itertools.pairwise(zip([COUNTED, *larger], found[len(cases) :], strict=True)):
        if not all(a < b < 2 * size for a, b in zip(got, more, strict=True)):
            grade.fail(f"all_reduce of {size} bytes: {got[0]:.0f} bytes on {n} workers and {more[0]:.0f} on {m}; "
                       "expected slightly more with each further worker, but less than twice the tensor")  # fmt: skip
    for n, got in zip(larger, found[-len(larger) :], strict=True):
        _check_growth(grade, counted, size, n, got)


def _check_growth(grade: Grade, counted: Counted, size: int, n: int, got: list[float]) -> None:
    """The bytes of all workers together grow by the same for each further worker, as they do where they are counted."""
    few, most = (np.multiply(of, counted.of("ring", of, 0, size)) for of in (COUNTED - 1, COUNTED))
    expected = most + (n - COUNTED) * (most - few)
    if not np.allclose(np.multiply(n, got), expected, rtol=1e-6, atol=n):
        grade.fail(
            f"all_reduce of {size} bytes: {got[0]:.0f} bytes on {n} workers, {n * got[0]:.0f} on all of them together; "
            f"expected {expected[0]:.0f}: each further worker adds as much as the step from {COUNTED - 1} to {COUNTED}"
        )


def check_gather_scatter(grade: Grade) -> None:
    """Rank 0 talks to all others, each of them to rank 0 only."""
    counted, draw = Counted(grade), grade.draw
    places = [(n, rank) for name, n, rank in sorted(counted.bytes) if name == "star"]
    cases = [[4 * int(draw.integers(1000, 9000)), n, rank] for n, rank in places]
    size, many = 4 * int(draw.integers(1000, 9000)), int(draw.integers(*LARGER))
    found = _traffic(grade, "gather_scatter_traffic", cases + [[size, many, rank] for rank in range(many)])
    for (asked, n, rank), got in zip(cases, found, strict=False):
        right, of_rank_0 = counted.of("star", n, rank, asked), counted.of("star", n, 0, asked)
        causes = {
            "rank 0's own tensor is not sent": asked * n,
            "that is what rank 0 moves; the others talk to rank 0 only": of_rank_0[0],
            "that is what the others move; rank 0 talks to each of them": asked,
            "that is an all_reduce": counted.of("ring", n, rank, asked)[0],
            "that is sent plus received": 2 * right[0],
        }
        _compare(grade, f"gather and scatter of {asked} bytes on {n} workers, rank {rank}", got, right, causes)
    (sent, received), *others = found[len(cases) :]
    for words, mine, theirs in (
        ("sends", sent, [b for _, b in others]),
        ("receives", received, [a for a, _ in others]),
    ):
        if not (math.isclose(mine, sum(theirs)) and len(set(theirs)) == 1 and theirs[0] > 0):
            grade.fail(f"gather and scatter on {many} workers: rank 0 {words} {mine:.0f} bytes; expected the total "
                       f"of the other {many - 1} ranks, which all move the same amount")  # fmt: skip


def _traffic(grade: Grade, function: str, cases: list) -> list[list[float]]:
    return grade.values("grader.probes.traffic:traffic", 1, function=function, cases=cases)[0]


def _compare(grade: Grade, what: str, got: list, right: tuple[float, float], causes: dict[str, float]) -> None:
    for way, mine, expected in zip(("sent", "received"), got, right, strict=True):
        if not (math.isfinite(mine) and math.isclose(mine, expected, rel_tol=1e-6, abs_tol=1)):
            cause = next(
                (f": {words}" for words, value in causes.items() if math.isclose(mine, value, rel_tol=1e-6)), ""
            )
            grade.fail(f"{what}: expected {expected:.0f} bytes {way}, got {mine:.0f}{cause}")


def _wrong_count(got: float, examples: int, batch: int, workers: int) -> str:
    """What is wrong with a number of iterations: they must hold all examples, and one less must not."""
    place = batch * workers
    if got * place < examples:
        return f"{got:g} iterations hold at most {got * place:g} of the {examples} examples"
    if not float(got).is_integer():
        return f"got {got:g} iterations: the number of iterations must be whole"
    if (got - 1) * place >= examples:
        return f"got {got:g} iterations, but fewer hold all {examples} examples, too"
    return ""


def _words(examples: int, batch: int, workers: int) -> str:
    return f"{examples} examples on {workers} workers, {batch} in a worker's batch"


def check_iterations(grade: Grade) -> None:
    """Padded shares, and a last batch that may be short."""
    drawn = [[int(grade.draw.integers(*span)) for span in ((100, 900), (2, 20), (2, 9))] for _ in range(4)]
    cases = [*map(list, ITERATIONS), *drawn]
    counts = grade.values("grader.probes.traffic:iterations", 1, cases=cases)[0]
    for (examples, batch, n), got in zip(cases, counts, strict=True):
        if complaint := _wrong_count(got, examples, batch, n):
            causes = ITERATIONS.get((examples, batch, n), {})
            cause = next((f": {words}" for value, words in causes.items() if abs(value - got) < 0.01), "")
            grade.fail(f"{_words(examples, batch, n)}: {complaint}{cause}")


def check_epoch(grade: Grade) -> None:
    """An iteration's traffic as often as there are iterations."""
    each = [float(n) for n in grade.draw.integers(10_000, 90_000, size=2)]
    drawn = [tuple(int(grade.draw.integers(*span)) for span in ((100, 900), (2, 20), (2, 9))) for _ in range(3)]
    cases = [(2490, 16, 4), (2490, 8, 4), (2490, 4, 4), (22, 7, 3), *drawn]
    values = grade.values("grader.probes.traffic:epoch", 1, cases=[[each, *case] for case in cases])[0]
    for case, got in zip(cases, values, strict=True):
        for way, iteration, moved in zip(("sent", "received"), each, got, strict=True):
            count = moved / iteration
            if math.isfinite(count) and math.isclose(count, round(count), rel_tol=1e-6):
                count = round(count)
            if complaint := _wrong_count(count, *case):
                grade.fail(
                    f"an epoch of {_words(*case)}: {iteration:.0f} bytes {way} in each iteration, got {moved:.0f} in "
                    f"the epoch: {_cause_in_epoch(count, *case) or complaint}"
                )


def _cause_in_epoch(count: float, examples: int, batch: int, workers: int) -> str:
    """The mistake that moves an iteration's bytes so often."""
    causes = {
        "that is one iteration": count == 1,
        "that is the sum over all workers": not _wrong_count(count / workers, examples, batch, workers),
        "bytes of an iteration do not depend on the batch size: gradients have the size of the model": (
            not _wrong_count(count / batch, examples, batch, workers)
        ),
        "bytes of an iteration do not depend on the number of examples": count == examples,
    }
    return next((words for words, fits in causes.items() if fits), "")
