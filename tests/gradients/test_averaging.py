"""Averaging gradients: 2a.3 with gather and scatter, 2b.1 with all_reduce, 2b.7 for GPT-2.

Every rank starts with its own gradients; afterwards each must hold the mean of all of them in param.grad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from grader.arithmetic import Tolerance, norm, proportional
from grader.call_checks import Payloads, Sent, all_calls, check_sent, must_be_own_calls, must_use, names_used
from grader.compare import Expected, check, with_inputs
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.outcome import Result
from grader.wire import drawn, values
from grader.wire.values import Fields

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dtype_of, nn, torch, unchanged

graded = pytest.mark.graded
SYNC, AVERAGE = "sync_gradients", "average_gradients"  # the functions that students write
BY_HAND = "average the gradients with torch.distributed's collectives"
SHARED = (
    "it has the mean of the last parameter of this shape: do parameters of one shape share a buffer? Each needs its own"
)
HINTS = {  # torch's words -> what they mean here
    "must be alike, got ()": "mean() without a dimension also averages the elements: pass the workers' dimension",
    "scatter: the tensors of one call must be alike": "each entry of scatter's list must be the whole mean, in the "
    "shape of param.grad: scatter gives every rank one entry as it is, and cuts nothing",
    "dtypesFound ... scatter(": "what scatter sends and what it is received into have different dtypes: convert "
    "the mean back to the dtype of param.grad",
    "gather_list`` must be": "rank 0 is the root of the gather: dst=0, and the list on rank 0 only",
    "scatter_list`` must be": "rank 0 is the root of the scatter: src=0, and the list on rank 0 only",
}
ZERO = {  # the same in a run where one rank has a gradient of zeros
    "different shapes": "the ranks do not pass the same gradients in the same order: does a rank leave out one that is "
    "zero there, as one is on the last rank? Leave out only None",
}
NOT_FINITE = {
    "different shapes": "the ranks do not pass the same gradients in the same order: does a rank leave out one that "
    "holds inf or nan, as two do on the last rank? Leave out only None",
}


class AveragingSetting(NamedTuple):
    """The gradients of one run: the function is called twice, as in a training loop.

    without: for each call, the parameters that have no gradient; its length is the number of calls. zero: the
    parameters whose gradient is zero, only on the last rank; tied: two layers share the last parameter; infinite: the
    parameters whose gradient holds an inf or a nan, in turn, only on the last rank.
    """

    shapes: tuple[tuple[int, ...], ...] = drawn.SHAPES
    without: tuple[tuple[int, ...], ...] = ((), ())
    frozen: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    tied: bool = False
    dtypes: tuple[str, ...] = ("float32",)  # of the parameters, in turn
    infinite: tuple[int, ...] = ()

    @property
    def n_calls(self) -> int:
        return len(self.without)

    def dtype(self, k: int) -> str:
        return self.dtypes[k % len(self.dtypes)]


PLAIN = AveragingSetting()
ODD = AveragingSetting(
    ((4, 3), (5,), (4, 3), (2, 2), (3, 5), (6,), (4, 3)), ((3, 5), (0, 5)), frozen=(1,), zero=(2,), tied=True
)
LARGE = AveragingSetting(((3,), (640, 1024), (2, 4), (5,)), ((),))  # 2.6 MB: more than a usual bucket
HALF, MIXED = AveragingSetting(dtypes=("bfloat16",)), AveragingSetting(dtypes=("float32", "float16", "bfloat16"))
INFINITE = AveragingSetting(infinite=(1, 3))
SIZES = (3, 4)  # 3 comes first: there no two wrong factors give the same number
Gradients = list[list[list[Any]]]  # [rank][call][parameter]; None: no gradient


# --- what a rank does ---


@in_rank
def average(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Call the student's function on this rank's gradients; yield what it leaves, after each call."""
    arguments, start_value = context.arguments, inputs["start_value"]
    context.shuffle_addresses()
    parameters = [
        nn.Parameter(
            torch.full(shape, start_value, dtype=getattr(torch, dtype)), requires_grad=k not in arguments["frozen"]
        )
        for k, (shape, dtype) in enumerate(zip(arguments["shapes"], arguments["dtypes"], strict=True))
    ]
    half = (len(parameters) + 1) // 2
    first = parameters[:half] + (parameters[-1:] if arguments["tied"] else [])
    model = nn.ModuleList([nn.ParameterList(first), nn.ParameterList(parameters[half:])])
    for gradients in inputs["gradients"]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype).clone()
        with unchanged(model) as changed:
            context.event("begin")
            if arguments["lesson_function"] == "sync_gradients":
                lesson.sync_gradients(model, context.world_size)
            else:
                lesson.average_gradients(model)
        moved = [k for k, parameter in enumerate(parameters) if not bool((parameter == start_value).all())]
        left: Fields = {f"parameter {k}": copy_of(parameter.grad) for k, parameter in enumerate(parameters)}
        left |= {f"dtype {k}": dtype_of(parameter.grad) for k, parameter in enumerate(parameters)}
        yield left | {"moved": moved, "changed": changed}


# --- known mistakes ---


class OneParameter(NamedTuple):
    """The gradients of one parameter on all ranks, (ranks, *shape), and the rank whose result is judged."""

    all: np.ndarray
    rank: int
    was_sent: bool = True  # whether this rank has passed its own gradient to a collective

    @property
    def ranks(self) -> int:
        return len(self.all)

    @property
    def own(self) -> np.ndarray:
        return self.all[self.rank]

    def filled(self, value: float) -> np.ndarray:
        return np.full(self.all.shape[1:], value)


# mistake -> what it leaves on the rank; the first that fits
MISTAKES: dict[str, Callable[[OneParameter], np.ndarray | None]] = {
    "the gradient is None: a collective (all_reduce, scatter) works in place and returns no tensor, so do not assign "
    "its result": lambda g: None,
    "every worker still has its own gradient, which was never passed to a collective: do you send param.grad (the "
    "tensors of state_dict() have none), and do you also send the last bucket?":
        lambda g: g.filled(np.inf) if g.was_sent else g.own,  # inf: no gradient is like this
    "every gradient is the sum of the workers' gradients, not their mean: did you divide by world_size, as "
    "dist.get_world_size() gives it, and in place (/= or div_)?": lambda g: g.all.sum(0),
    "the gradient is still the worker's own: the result did not get into param.grad (.to(dtype), .clone() and "
    "param.grad / n are new tensors: copy the mean back), or it was sent back without a mean": lambda g: g.own,
    "param.grad is the worker's own gradient divided by world_size: nothing was summed": lambda g: g.own / g.ranks,
    "param.grad is rank 0's gradient: it was distributed without averaging": lambda g: g.all[0],
    "rank 0's own gradient is in the sum twice": lambda g: (g.all.sum(0) + g.all[0]) / g.ranks,
    "rank 0's own gradient is missing from the sum": lambda g: g.all[1:].sum(0) / g.ranks,
    "rank 0's own gradient is missing from the mean": lambda g: g.all[1:].mean(0),
    "the sum was divided by world_size twice (ReduceOp.AVG divides already)": lambda g: g.all.mean(0) / g.ranks,
    "every gradient is zero: was it zeroed before or after averaging?": lambda g: g.filled(0),
    "later workers count more: it is the mean of the mean so far and the next gradient; add up all, then divide once":
        lambda g: reduce(lambda mean, gradient: (mean + gradient) / 2, g.all),
    "all elements are equal: the mean was also taken over the elements (use dim=0)": lambda g: g.filled(g.all.mean()),
    "the sum was divided by the rank, not by the number of workers": lambda g: g.all.sum(0) / g.rank,
    "the division rounds down: // is for whole numbers": lambda g: g.all.sum(0) // g.ranks,
    "param.grad is the largest of the workers' gradients and not their mean": lambda g: g.all.max(0),
    "the parameters (param.data) were averaged, not gradients":
        lambda g: g.filled(sum(map(drawn.start_value, range(g.ranks))) / g.ranks),
}  # fmt: skip


def mistakes_of(ranks: int) -> dict[str, Callable[[OneParameter], np.ndarray | None]]:
    """Return the table of mistakes for a number of ranks; it is empty for one, whose mean is its own gradient."""
    if ranks == 1:
        return {}
    one_off = {ranks - 1: " (world_size - 1?)", ranks + 1: " (world_size + 1?)"}
    divisors = {
        f"the sum is divided by {number}{one_off.get(number, '')}, expected world_size, {ranks}": divided_by(number)
        for number in range(2, 17)
        if number != ranks
    }
    return MISTAKES | divisors


def divided_by(number: int) -> Callable[[OneParameter], np.ndarray]:
    return lambda g: g.all.sum(0) / number


def mean_of(
    gradients: list[np.ndarray], rank: int, payloads: Payloads, total: float, limit: np.ndarray | float | None = None
) -> Expected:
    """Expect the mean of one parameter's gradients on a rank."""
    one = OneParameter(np.asarray(gradients, np.float64), rank, payloads.include(rank, gradients[rank]))
    mean = np.asarray(one.all.mean(0))
    half = set[str]() if one.was_sent else payloads.dtypes & {"float16", "bfloat16"}
    rounded = f"gradients of float32 travel as {min(half)}, which rounds them" if half else ""
    table = with_inputs(mistakes_of(one.ranks), one)
    return Expected(mean, rounded, mistakes=table, tolerance=Tolerance(total, limit=limit))


# --- what is right ---


def draw(grade: Grade, ranks: int, setting: AveragingSetting) -> Gradients:
    """Draw each rank's gradients, rounded to the dtype."""

    def one(rank: int, call: int, k: int, array: np.ndarray) -> np.ndarray | None:
        if k in setting.frozen or k in setting.without[call]:
            return None
        is_last = rank == ranks - 1
        if is_last and k in setting.zero:
            array = array * 0
        if is_last and k in setting.infinite:
            array.flat[0] = np.nan if setting.infinite.index(k) % 2 else np.inf
        dtype = setting.dtype(k)
        return np.asarray(values.to_array(dtype, [*array.shape], values.to_bytes(array, dtype)))

    def of_call(rank: int, call: int) -> list[np.ndarray | None]:
        arrays = drawn.gradients(grade.seed + 1_000_003 * call, rank, list(setting.shapes))
        return [one(rank, call, k, array) for k, array in enumerate(arrays)]

    return [[of_call(rank, call) for call in range(setting.n_calls)] for rank in range(ranks)]


def averaged(grade: Grade, lesson_function: str, ranks: int, setting: AveragingSetting) -> tuple[Result, Gradients]:
    """Run the student's function; return the result, and the gradients that the ranks started with."""
    gradients = draw(grade, ranks, setting)
    inputs = [{"gradients": own, "start_value": drawn.start_value(rank)} for rank, own in enumerate(gradients)]
    arguments = {name: getattr(setting, name) for name in ("shapes", "frozen", "tied")}
    arguments |= {"dtypes": [setting.dtype(k) for k in range(len(setting.shapes))]}
    hints = HINTS | (ZERO if setting.zero else NOT_FINITE if setting.infinite else {})
    return run(grade, average, inputs, hints, lesson_function=lesson_function, **arguments), gradients


def check_mean(
    grade: Grade,
    lesson_function: str,
    setting: AveragingSetting = PLAIN,
    sizes: tuple[int, ...] = SIZES,
    by: set[str] | None = None,
) -> None:
    """Check that every rank holds the mean, and that all else is unchanged. `by`: the collectives that it may use."""
    for ranks in sizes:
        result, gradients = averaged(grade, lesson_function, ranks, setting)
        check_each_call(grade, setting, result, gradients)
        must_be_own_calls(grade, result, BY_HAND)
        if by:
            must_use(grade, result, by)


def check_each_call(
    grade: Grade, setting: AveragingSetting, result: Result, gradients: Gradients, where: str = ""
) -> None:  # fmt: skip
    """Check that every rank holds what it must after every call."""
    payloads = Payloads(result)
    for call in range(setting.n_calls):
        again = "in the second call, with different gradients: do not reuse anything from the first call\n"
        dtype = "" if setting.dtypes == PLAIN.dtypes else f"gradients of {', '.join(setting.dtypes)}: "
        mean = f"expected the mean of {len(gradients)} workers' gradients; on rank {{rank}}, "
        got = {(rank, name): one for rank, left in enumerate(result.values) for name, one in left[call].items()}
        expected = after_call(setting, [own[call] for own in gradients], payloads)
        check(grade, f"{again if call else ''}{where}{dtype}{mean}", got, expected, result)


def after_call(
    setting: AveragingSetting, gradients: list[list[Any]], payloads: Payloads
) -> dict[tuple[int, str], Expected]:
    """Return what every rank must hold after a call. `gradients`: [rank][parameter], before it."""
    columns = [list(column) for column in zip(*gradients, strict=True)]
    total = norm([np.mean(column, axis=0) for column in columns if column[0] is not None])
    expected: dict[tuple[int, str], Expected] = {}
    for rank in range(len(gradients)):
        expected[rank, "moved"] = Expected([], "the parameters themselves changed: average only param.grad")
        for k, column in enumerate(columns):
            if column[0] is None:
                message = f"parameter {k} has no gradient on any worker, or is frozen, but has a gradient now"
                expected[rank, f"parameter {k}"] = Expected(None, message)
                continue
            dtype = setting.dtype(k)
            limit = None if dtype == "float32" else 0.04 * np.abs(column).max(axis=0) + 1e-6
            one = mean_of(column, rank, payloads, total, limit)
            same = [other for other in columns if other[0] is not None and other[0].shape == column[0].shape]
            shared = {SHARED: np.asarray(np.mean(same[-1], axis=0))}
            expected[rank, f"parameter {k}"] = replace(one, mistakes=dict(one.mistakes) | shared)
            expected[rank, f"dtype {k}"] = Expected(dtype, name=f"the dtype of parameter {k}'s gradient")
        expected[rank, "changed"] = Expected([], "averaging changes {got}, but must leave it unchanged")
    return expected


def check_any_size_and_type(grade: Grade, lesson_function: str, by: set[str] | None = None) -> None:
    """Check the mean of a tensor of megabytes beside small ones, of 16-bit, mixed and infinite gradients, and for one
    worker."""
    for setting, ranks in ((LARGE, 2), (HALF, 3), (MIXED, 2), (INFINITE, 2), (PLAIN, 1)):
        check_mean(grade, lesson_function, setting, (ranks,), by)


# Ways to average: collective -> (a function of the number of ranks that says how many times rank 0, and how many times
# every other rank, passes its gradients to it; the root).
GATHER_AND_SCATTER: list[Fields] = [{"gather": (lambda n: (1, 1), 0), "scatter": (lambda n: (n, 0), 0)}]
REDUCE: list[Fields] = [
    {"all_reduce": (lambda n: (1, 1), None)},
    {"reduce": (lambda n: (1, 1), 0), "broadcast": (lambda n: (1, 0), 0)},
]


def check_sent_once(grade: Grade, lesson_function: str, ways: list[Fields], setting: AveragingSetting = PLAIN) -> None:
    """Check that every gradient is sent once, in one of `ways`, and that the result is used."""
    for ranks in SIZES:
        result, gradients = averaged(grade, lesson_function, ranks, setting)
        must_be_own_calls(grade, result, BY_HAND)
        way = next((way for way in ways if set(way) == names_used(all_calls(result))), ways[0])
        for rank, own_calls in enumerate(gradients):
            own = [gradient for call in own_calls for gradient in call if gradient is not None]
            size, first = 4 * sum(gradient.size for gradient in own), next(iter(way))
            expected: dict[str, Sent] = {}
            for name, (times, root) in way.items():
                of_rank_0, of_others = times(ranks)
                count = of_others if rank else of_rank_0
                expected[name] = Sent(size * count, own if name == first else None, root)
            check_sent(grade, rank, result.ranks[rank].calls, expected, "each gradient")
            check_used(grade, rank, result.values[rank], gradients)


def check_used(grade: Grade, rank: int, left: list[Fields], gradients: Gradients) -> None:
    """Check that a rank's gradients are the mean of all ranks' gradients, times one factor."""
    places = [(call, k) for call, own in enumerate(gradients[rank]) for k, one in enumerate(own) if one is not None]
    means = [np.asarray(np.mean([other[call][k] for other in gradients], axis=0)) for call, k in places]
    if not proportional([left[call][f"parameter {k}"] for call, k in places], means):
        unused = "its gradients are neither the mean nor the sum of all workers' gradients"
        grade.fail(observed=f"rank {rank} does not use what was sent: {unused}")


# --- the graded tests ---


@graded("2a.3", weight=2)
def test_gather_and_scatter_leave_the_mean_on_every_worker(grade: Grade) -> None:
    check_mean(grade, SYNC, by={"gather", "scatter"})


@graded("2a.3")
def test_gather_and_scatter_leave_the_mean_whatever_the_size_and_type(grade: Grade) -> None:
    check_any_size_and_type(grade, SYNC, {"gather", "scatter"})


@graded("2a.3")
def test_gather_and_scatter_leave_out_what_has_no_gradient(grade: Grade) -> None:
    check_mean(grade, SYNC, ODD, (3,), {"gather", "scatter"})


@graded("2a.3")
def test_rank_0_gathers_and_scatters_every_gradient_once(grade: Grade) -> None:
    check_sent_once(grade, SYNC, GATHER_AND_SCATTER)


@graded("2b.1")
def test_all_reduce_leaves_the_mean_on_every_worker(grade: Grade) -> None:
    check_mean(grade, SYNC)


@graded("2b.1")
def test_all_reduce_leaves_the_mean_whatever_the_size_and_type(grade: Grade) -> None:
    check_any_size_and_type(grade, SYNC)


@graded("2b.1")
def test_all_reduce_leaves_out_what_has_no_gradient(grade: Grade) -> None:
    check_mean(grade, SYNC, ODD, (3,))


@graded("2b.1")
def test_every_gradient_is_reduced_once(grade: Grade) -> None:
    check_sent_once(grade, SYNC, REDUCE)


@graded("2b.7", weight=2)
def test_average_gradients_leaves_the_mean_on_every_worker(grade: Grade) -> None:
    check_mean(grade, AVERAGE)
    check_any_size_and_type(grade, AVERAGE)


@graded("2b.7")
def test_average_gradients_handles_tied_and_missing_gradients(grade: Grade) -> None:
    check_mean(grade, AVERAGE, ODD, (3,))
    check_sent_once(grade, AVERAGE, REDUCE, ODD)
