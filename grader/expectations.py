"""Judges region 4.2, the expected traffic, by literal cases and by properties that every right answer has.

The lesson's own formulas are not here. A table holds the bytes of one size, and twice the size moves twice the bytes.
"""

import math

import numpy as np

from grader.grading import Grade

# What one worker sends when a ring reduces a tensor of 840 bytes, by the number of workers: counted by hand.
RING = {2: 840, 3: 1120, 4: 1260, 5: 1344, 6: 1400, 7: 1440, 8: 1470}
RING_SIZE = 840
# (workers, rank): how many tensors a worker sends in gather and scatter, and how many it receives.
GATHER_SCATTER = {
    (2, 0): 1, (2, 1): 1, (3, 0): 2, (3, 1): 1, (3, 2): 1, (4, 0): 3, (4, 1): 1, (4, 3): 1, (5, 0): 4, (6, 0): 5,
    (7, 0): 6, (7, 3): 1, (8, 0): 7, (8, 7): 1,
}  # fmt: skip
# (examples, batch of a worker, workers): iterations, and the mistakes that give other numbers.
LAST, ALONE, PART, PADS = (
    "the last batch, which is not full, counts too",
    "that many one worker alone would make",
    "a part of an iteration is not possible",
    "the sampler pads: examples that do not divide are one more on every worker",
)
ITERATIONS: dict[tuple[int, int, int], tuple[int, dict[float, str]]] = {
    (2490, 16, 4): (39, {38: LAST, 156: ALONE, 38.9375: PART}),
    (10, 1, 4): (3, {2: PADS, 10: ALONE, 2.5: PART}),
    (10, 3, 4): (1, {0: LAST, 4: ALONE}),
    (22, 7, 3): (2, {1: LAST, 4: ALONE}),
    (64, 16, 2): (2, {4: ALONE}),
    (3, 8, 4): (1, {0: LAST}),
    (17, 4, 1): (5, {4: LAST, 4.25: PART}),
    (100, 1, 8): (13, {12: PADS, 100: ALONE, 12.5: PART}),
}


def check_gradient_bytes(grade: Grade) -> None:
    """Shared tensors once, frozen and unused ones not at all, and the dtype's size."""
    count: list[int] = []
    while len({*count[1:5:2], *count[4:5], sum(count[1:5:2])}) < 4:  # so that no wrong sum looks like another
        shapes = [[int(n) for n in grade.draw.integers(2, 9, size=2)] for _ in range(5)] + [[7], [640, 1000], []]
        count = [int(np.prod(shape)) for shape in shapes]
    setting = {"shapes": shapes, "frozen": [1], "without": [3], "tied": [4]}
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        got = grade.values("grader.probes_traffic:gradient_bytes", 1, dtype=dtype, **setting)[0]
        expected = size * (count[0] + count[2] + sum(count[4:]))
        causes = {
            "the tensor that two layers share is counted twice": expected + size * count[4],
            "the frozen tensor is counted, and never sent": expected + size * count[1],
            "the unused tensor, whose gradient is None, is counted": expected + size * count[3],
            "frozen and unused tensors are counted, and never sent": expected + size * (count[1] + count[3]),
            "those are elements, not bytes": expected / size,
            "those are bits": 8 * expected,
            f"an element of {dtype} takes {size} bytes, not 4": expected * 4 / size,
        }
        if got != expected:
            cause = next((f": {words}" for words, value in causes.items() if value == got), "")
            grade.fail(f"gradient_bytes as {dtype}: expected {expected}, got {got:.0f}{cause}")


def check_all_reduce(grade: Grade) -> None:
    """What a ring sends and receives, for several sizes and numbers of workers."""
    # 7 workers first: there no wrong factor looks like another
    cases = [[RING_SIZE * int(grade.draw.integers(100, 900)), n] for n in (7, 3, 2, 4, 5, 8, 6)]
    for (size, n), got in zip(cases, _traffic(grade, "all_reduce_traffic", cases), strict=True):
        right = size * RING[n] // RING_SIZE
        causes = {
            "that is the tensor itself, without the factor of the ring": size,
            "that is half: a piece goes round twice, once to add and once to hand out": right / 2,
            "that is the sum over all workers, and one worker was asked for": right * n,
            "that is what a root would send that hands the sum to all": GATHER_SCATTER[n, 0] * size,
            "that is twice the tensor, which a ring comes near to but does not reach": 2 * size,
            "that is sent and received added up": 2 * right,
            "those are bits": 8 * right,
        }
        _compare(grade, f"all_reduce of {size} bytes on {n} workers", got, (right, right), causes)


def check_gather_scatter(grade: Grade) -> None:
    """Rank 0 talks to all others, each of them to rank 0 only."""
    cases = [[4 * int(grade.draw.integers(1000, 9000)), n, rank] for n, rank in GATHER_SCATTER]
    for (size, n, rank), got in zip(cases, _traffic(grade, "gather_scatter_traffic", cases), strict=True):
        right, of_rank_0 = GATHER_SCATTER[n, rank] * size, GATHER_SCATTER[n, 0] * size
        causes = {
            "rank 0's own tensor does not travel": size * n,
            "that is what rank 0 moves; the others talk to rank 0 only": of_rank_0,
            "that is what the others move; rank 0 talks to each of them": size,
            "that is an all_reduce": RING[n] * size / RING_SIZE,
            "that is sent and received added up": 2 * right,
        }
        _compare(grade, f"gather and scatter of {size} bytes on {n} workers, rank {rank}", got, (right, right), causes)


def _traffic(grade: Grade, function: str, cases: list) -> list[list[float]]:
    return grade.values("grader.probes_traffic:traffic", 1, function=function, cases=cases)[0]


def _compare(grade: Grade, what: str, got: list, right: tuple[float, float], causes: dict[str, float]) -> None:
    for way, mine, expected in zip(("sent", "received"), got, right, strict=True):
        if not (math.isfinite(mine) and math.isclose(mine, expected, rel_tol=1e-6, abs_tol=1)):
            cause = next(
                (f": {words}" for words, value in causes.items() if math.isclose(mine, value, rel_tol=1e-6)), ""
            )
            grade.fail(f"{what}: expected {expected:.0f} bytes {way}, got {mine:.0f}{cause}")


def check_iterations(grade: Grade) -> None:
    """Padded shares, and a last batch that may be short."""
    drawn = [[int(grade.draw.integers(*span)) for span in ((100, 900), (2, 20), (2, 9))] for _ in range(4)]
    cases = [*map(list, ITERATIONS), *drawn]
    counts = grade.values("grader.probes_traffic:iterations", 1, cases=cases)[0]
    for (examples, batch, n), got in zip(cases, counts, strict=True):
        what = f"{examples} examples on {n} workers, {batch} in a worker's batch"
        right, causes = ITERATIONS.get((examples, batch, n), (None, {}))
        if right is not None and got != right:
            cause = next((f": {words}" for value, words in causes.items() if abs(value - got) < 0.01), "")
            grade.fail(f"{what}: expected {right} iterations, got {got:g}{cause}")
        # Whatever the sizes: all examples fit into the batches, and not into one batch fewer.
        if not (math.isfinite(got) and got == int(got) and (got - 1) * batch * n < examples <= got * batch * n):
            grade.fail(
                f"{what}: got {got:g} iterations of {batch * n} examples; expected the smallest number of iterations "
                "that takes all examples"
            )


def check_epoch(grade: Grade) -> None:
    """An iteration's traffic as often as there are iterations, by the file's own count or by the right one."""
    sent, received = (float(n) for n in grade.draw.integers(10_000, 90_000, size=2))
    rights = {(2490, 16, 4): 39, (2490, 8, 4): 78, (2490, 4, 4): 156, (22, 7, 3): 2}
    cases = [[[sent, received], *case] for case in rights]
    values = grade.values("grader.probes_traffic:epoch", 1, cases=cases)[0]
    for ((examples, batch, n), right), (*got, own) in zip(rights.items(), values, strict=True):
        counted = own if math.isfinite(own) and own >= 1 else right
        if math.isclose(got[0], sent * right, rel_tol=1e-6):
            counted = right
        causes = {
            "that is one iteration": sent,
            "that is the sum over all workers": sent * counted * n,
            "bytes of an iteration do not depend on the batch: gradients have the size of the model": sent
            * counted
            * batch,
            "bytes of an iteration do not depend on the number of examples": sent * examples,
        }
        _compare(grade, f"an epoch of {counted:g} iterations", got, (sent * counted, received * counted), causes)
