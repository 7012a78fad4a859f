"""Task 4, 4.2: the bytes that a worker must send and receive, and the iterations of an epoch.

The lesson's formulas are not here. Bytes are compared with cases that were counted message by message, times a drawn
number, and with drawn cases that are counted in this way now. The iterations of an epoch must have a property: they
hold all examples, and one fewer would not.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.compare import check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.wire.values import Fields
from tests.ring_messages import messages_of_each
from tests.task4.test_traffic import BYTES, FLAGS, value_of

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, nn, torch

graded = pytest.mark.graded
FILE = "task4_traffic/expected.py"


# --- what a rank does ---


@in_rank(preload=["scripts"], join=False)
def gradient_bytes(context: Context, lesson: ModuleType, inputs: Fields) -> list[float]:
    """Return gradient_bytes of a model with a tied, a frozen and an unused tensor, for every dtype."""
    arguments, parameters = context.arguments, []
    for k, shape in enumerate(arguments["shapes"]):
        parameters.append(nn.Parameter(torch.zeros(shape), requires_grad=k != arguments["frozen"]))
        if k not in (arguments["frozen"], arguments["unused"]):
            parameters[k].grad = torch.ones(shape)
    model = nn.ModuleList([nn.ParameterList(parameters), nn.ParameterList([parameters[arguments["tied"]]])])
    return [float(lesson.gradient_bytes(model, getattr(torch, dtype))) for dtype in arguments["dtypes"]]


@in_rank(preload=["scripts"], join=False)
def call_in_each_case(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield what the student's function returns in each case: a number, or Traffic as [sent, received]."""
    for traffic, *case in context.arguments["cases"]:
        first = [lesson.Traffic(*traffic)] if isinstance(traffic, list) else [traffic]
        value = getattr(lesson, context.arguments["calls"])(*first, *case)
        if hasattr(value, "sent"):
            yield [float(value.sent), float(value.received)]
        else:
            yield float(value) if isinstance(value, int | float) else repr(value)[:80]


def results(grade: Grade, function: str, cases: list[tuple]) -> list[Any]:
    """Return what a function returns in each case."""
    (values,) = run(grade, call_in_each_case, [{}], calls=function, cases=[list(case) for case in cases]).values
    kind = float if function == "iterations_per_epoch" else list
    for value in values:
        if not isinstance(value, kind):
            expected = "a number" if kind is float else "Traffic(sent, received)"
            grade.fail(observed=f"{function} returned {value}; expected {expected}")
    return list(values)


# --- gradient_bytes ---


@graded("4.2")
def test_gradient_bytes_count_what_is_sent(grade: Grade) -> None:
    """Check that tied tensors count once, frozen and unused ones never, and an element has the dtype's size."""
    rows = int(grade.draw.integers(3, 40))
    shapes = [(rows,), (rows, 2), (2, rows, 2), (rows, 8), (16, rows), ()]  # no two sums of these are equal
    count = [math.prod(shape) for shape in shapes]
    frozen, unused, tied = 1, 3, 4
    arguments: Fields = {"shapes": shapes, "frozen": frozen, "unused": unused, "tied": tied}
    (values,) = run(grade, gradient_bytes, [{}], dtypes=list(BYTES), **arguments).values
    for (dtype, size), got in zip(BYTES.items(), values, strict=True):
        right = size * (sum(count) - count[frozen] - count[unused])
        mistakes = {
            "the tensor that two layers share is counted twice": right + size * count[tied],
            "the unused tensor, whose gradient is None, is counted": right + size * count[unused],
            "frozen and unused tensors are counted, but never sent": size * sum(count),
            "those are elements, not bytes": right // size,
            BITS: 8 * right,
            f"an element of {FLAGS[dtype]} takes {size} bytes, not 4": right * 4 // size,
        }
        name = f"gradient_bytes as {FLAGS[dtype]}"
        check(grade, "", {name: whole(got, right)}, {name: value_of(name, right, mistakes)})
    grade.imports_only_allowed(FILE)


# --- the traffic of an iteration ---

# (bytes of a piece, workers); 7 workers come first: there no two wrong factors give the same number.
SIZES = ((19, 7), (23, 2), (17, 3), (29, 4), (13, 5), (31, 6), (11, 8), (13, 9), (13, 11), (13, 12), (10, 32), (10, 39))
PIECES = {  # of 4 bytes on 8 workers, where a piece is half a byte: what a worker sends if it rounds each piece
    "each piece, here half a byte, is rounded down: only the result may be rounded": 0,
    "each piece, here half a byte, is rounded up: only the result may be rounded": 14,
}
BITS = "those are bits, and a byte has 8"


def whole(got: float, right: int) -> float:
    """Return bytes as a whole number; `right` if they differ from it only by rounding."""
    if not math.isfinite(got):
        return got
    return right if abs(got - right) <= 1 else round(got)


def check_traffic(grade: Grade, what: str, got: list[float], right: int, mistakes: Fields) -> None:
    """Check the bytes that a worker sends and receives: both must be `right`."""
    names = [f"{what}, bytes {way}" for way in ("sent", "received")]
    mistakes = mistakes | {"that is sent plus received": 2 * right, BITS: 8 * right}
    expected = {name: value_of(name, right, mistakes) for name in names}
    check(grade, "", {name: whole(moved, right) for name, moved in zip(names, got, strict=True)}, expected)


def moved(grade: Grade, most: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (bytes of a tensor, workers) -> the bytes that a worker sends, and receives, in a ring's all_reduce, and
    those of rank 0 in gather and scatter. Some cases are drawn."""
    workers = [1, *grade.draw.choice(np.arange(10, most), 3, replace=False).tolist()]
    cases = [*(one for one in SIZES if one[1] < most), *((int(grade.draw.integers(11, 99)), n) for n in workers)]
    return {
        (piece * n, n): (piece * messages_of_each(n)[0], sum(piece * n for other in range(n) if other))
        for piece, n in cases
    }


@graded("4.2")
def test_the_ring_s_traffic_is_right_for_every_number_of_workers(grade: Grade) -> None:
    """Check the traffic of a ring, with a few workers and with many."""
    factor = int(grade.draw.integers(1000, 9000))
    every_case = moved(grade, 300)
    cases = [(factor * size, n) for size, n in every_case]
    *values, of_half_a_byte = results(grade, "all_reduce_traffic", [*cases, (4, 8)])
    for (size, n), each_moves, got in zip(cases, every_case.values(), values, strict=True):
        right, of_a_root = (factor * each for each in each_moves)
        mistakes = {
            "that is the tensor itself, without the factor of the ring": size,
            "that is half: every piece travels around the ring twice, to be summed and to be distributed": right // 2,
            "that is the sum over all workers; return the bytes of one worker": right * n,
            "that is what a root sends if it sends the sum to every worker": of_a_root,
            "that is twice the tensor, which a ring approaches but never reaches": 2 * size,
        }
        check_traffic(grade, f"all_reduce of {size} bytes on {n} workers", got, right, mistakes)
    check_traffic(grade, "all_reduce of 4 bytes on 8 workers", of_half_a_byte, 7, PIECES)


@graded("4.2")
def test_gather_and_scatter_cost_rank_0_more(grade: Grade) -> None:
    """Check that rank 0 communicates with all others, and each of them with rank 0 only."""
    factor = int(grade.draw.integers(100, 9000))
    every_case = moved(grade, 30)
    cases = [(factor * size, n, rank) for size, n in every_case for rank in range(n)]
    for (size, n, rank), got in zip(cases, results(grade, "gather_scatter_traffic", cases), strict=True):
        of_a_ring, of_rank_0 = (factor * each for each in every_case[size // factor, n])
        mistakes = {
            "rank 0's own tensor is not sent": size * n,
            "scatter sends each worker the whole mean, and not a piece of it": of_rank_0 // n,
            "that is what rank 0 moves; the others talk to rank 0 only": of_rank_0,
            "that is what the others move; rank 0 talks to each of them": size,
            "that is an all_reduce": of_a_ring,
        }
        what = f"gather and scatter of {size} bytes on {n} workers, rank {rank}"
        check_traffic(grade, what, got, size if rank else of_rank_0, mistakes)


# --- the iterations of an epoch ---

ALONE, LAST = "that is the number for a single worker", "the last batch, which is not full, counts too"
PADS = "the sampler pads: if the examples do not divide evenly, every worker gets one more"
EPOCHS: dict[tuple[int, int, int], dict[float, str]] = {  # (examples, batch of a worker, workers): wrong iterations
    (2490, 16, 4): {38: LAST, 156: ALONE},
    (10, 1, 4): {2: PADS},
    (10, 3, 4): {},
    (22, 7, 3): {1: LAST},
    (64, 16, 2): {},
    (3, 8, 4): {},
    (17, 4, 1): {},
    (100, 1, 8): {},
}


def draw_epochs(grade: Grade) -> list[tuple[int, int, int]]:
    draw = grade.draw.integers
    return [(int(draw(100, 900)), int(draw(2, 20)), int(draw(2, 9))) for _ in range(4)]


def why_wrong(count: float, examples: int, batch: int, workers: int) -> str:
    """Say what is wrong with a number of iterations, "" if nothing is."""
    per_iteration = batch * workers
    if count * per_iteration < examples:
        return f"{count:g} iterations hold at most {count * per_iteration:g} of the {examples} examples"
    if not float(count).is_integer():
        return f"got {count:g} iterations: the number of iterations must be whole"
    if (count - 1) * per_iteration >= examples:
        return f"got {count:g} iterations, but fewer hold all {examples} examples, too"
    return ""


def in_words(examples: int, batch: int, workers: int) -> str:
    return f"{examples} examples on {workers} workers, {batch} in a worker's batch"


@graded("4.2")
def test_iterations_of_an_epoch_count_padding_and_the_short_batch(grade: Grade) -> None:
    """Check the iterations of an epoch: workers have equally many examples, and the last batch may be short."""
    cases = [*EPOCHS, *draw_epochs(grade)]
    for case, got in zip(cases, results(grade, "iterations_per_epoch", cases), strict=True):
        if complaint := why_wrong(got, *case):
            cause = EPOCHS.get(case, {}).get(got, "")
            grade.fail(f"{in_words(*case)}: {complaint}{f': {cause}' if cause else ''}")


WAYS = ("sent", "received")


@graded("4.2")
def test_an_epoch_sends_an_iteration_s_bytes_as_often_as_it_has_iterations(grade: Grade) -> None:
    """Check that an epoch moves the bytes of an iteration as often as it has iterations."""
    iteration = [n + 0.75 for n in grade.draw.integers(10_000, 90_000, size=2).tolist()]
    cases = [(2490, 16, 4), (2490, 8, 4), (2490, 4, 4), (22, 7, 3), *draw_epochs(grade)]
    values = results(grade, "traffic_per_epoch", [(iteration, *case) for case in cases])
    for case, got in zip(cases, values, strict=True):
        rows = zip(WAYS, iteration, reversed(WAYS), reversed(iteration), got, strict=True)
        for way, per_iteration, other_way, of_other_way, per_epoch in rows:
            count = per_epoch / per_iteration  # a float, with noise
            if math.isfinite(count) and abs(per_epoch - round(count) * per_iteration) <= 1:
                count = round(count)
            if complaint := why_wrong(count, *case):
                cause = why_so_often(count, *case)
                if not why_wrong(round(per_epoch / of_other_way, 6), *case):
                    cause = f"these are the bytes {other_way}, not those {way}: each has its own number in `iteration`"
                sentence = f"{per_iteration:.2f} bytes {way} in each iteration, got {per_epoch:.0f} in the epoch"
                grade.fail(f"an epoch of {in_words(*case)}: {sentence}: {cause or complaint}")


def why_so_often(count: float, examples: int, batch: int, workers: int) -> str:
    """Return the mistake that counts an iteration's bytes so often, "" if it is no known one."""
    independent = "bytes of an iteration do not depend on the"
    mistakes = {
        "that is one iteration: does iterations_per_epoch return 1 here?": count == 1,
        "that is the sum over all workers": not why_wrong(count / workers, examples, batch, workers),
        f"{independent} batch size: gradients have the size of the model":
            not why_wrong(count / batch, examples, batch, workers),
        f"{independent} number of examples": count == examples,
    }  # fmt: skip
    return next((sentence for sentence, fits in mistakes.items() if fits), "")
