"""Task 4, 4.1: the averaging of 2b.1, which also records every tensor that it sends, in the dtype of --grad_dtype.

What each rank has recorded is compared with the tensors that the broker got from it; every rank must hold the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from grader.arithmetic import same_numbers
from grader.call_checks import Sent, check_sent, must_be_own_calls, phases
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields, item_bytes
from tests.gradients import test_averaging as averaging
from tests.gradients.test_averaging import INFINITE, LARGE, MIXED, ODD, PLAIN, AveragingSetting, Gradients

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dist, dtype_of, nn, torch, unchanged

graded = pytest.mark.graded
FILE = "task4_traffic/run_glue.py"
BYTES = {dtype: item_bytes(dtype) for dtype in ("float32", "bfloat16", "float16")}
FLAGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # --grad_dtype
HALF = ("bfloat16", "float16")
CONVERT = "send gradient.to(dtype), which is a new tensor: the gradient itself keeps its dtype"


# --- what a rank does ---


def as_text(entry: object) -> dict[str, str]:
    """Return the values of an entry as text, a shape as a list and a dtype without `torch.`."""
    if not isinstance(entry, dict):
        return {"class": type(entry).__name__}
    values = {"class": "dict"}
    for name in ("shape", "dtype", "elements", "bytes"):
        value = entry.get(name)
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, float):
            value = int(value)
        values[name] = str(value)[:80].removeprefix("torch.")
    return values


def report_entries(context: Context) -> None:
    """Let every all_reduce first report what `sent` holds at that moment."""
    sent = context.arguments["sent"] = []
    for module in (dist, dist.distributed_c10d):
        context.spy(module, "all_reduce", "sends", lambda *_, **__: {"entries": [as_text(entry) for entry in sent]})


@in_rank(uses=[as_text, report_entries], first="report_entries", preload=["scripts"])
def average_and_record(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Call the student's function on this rank's gradients; yield what it leaves, and `sent`, after each iteration."""
    arguments, start_value, sent = context.arguments, inputs["start_value"], context.arguments["sent"]
    context.shuffle_addresses()
    parameters = [
        nn.Parameter(
            torch.full(shape, start_value, dtype=getattr(torch, own)), requires_grad=k not in arguments["frozen"]
        )
        for k, (shape, own) in enumerate(zip(arguments["shapes"], arguments["dtypes"], strict=True))
    ]
    model = nn.ParameterList([*parameters, parameters[-1]])  # two layers share the last one
    for gradients in inputs["gradients"]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            twice = None if gradient is None else torch.stack([gradient, gradient]).to(parameter.dtype)
            parameter.grad = None if twice is None else twice[0]  # of more memory
        sent.clear()
        with unchanged(model) as changed:
            context.event("begin")
            lesson.sync_gradients(model, context.world_size, getattr(torch, arguments["dtype"]), sent)
        left: Fields = {f"parameter {k}": copy_of(parameter.grad) for k, parameter in enumerate(parameters)}
        left |= {f"dtype {k}": dtype_of(parameter.grad) for k, parameter in enumerate(parameters)}
        moved = [k for k, parameter in enumerate(parameters) if not bool((parameter == start_value).all())]
        yield left | {"moved": moved, "changed": changed, "sent": [as_text(entry) for entry in sent]}


def synced(
    grade: Grade, ranks: int, dtype: str = "float32", setting: AveragingSetting = ODD
) -> tuple[Result, Gradients]:
    """Run the student's function; return the result, and the gradients that the ranks started with.

    In half precision these gradients, and their sum and mean on two ranks, need no rounding.
    """
    gradients = averaging.draw(grade, ranks, setting)
    if dtype in HALF:
        gradients = [
            [[np.asarray(np.round(one * (127 / np.abs(one).max())) / 128, np.float32) for one in call] for call in own]
            for own in gradients
        ]
    inputs = [{"gradients": own, "start_value": drawn.start_value(rank)} for rank, own in enumerate(gradients)]
    dtypes = [setting.dtype(k) for k in range(len(setting.shapes))]
    arguments: Fields = {"shapes": setting.shapes, "frozen": setting.frozen, "dtypes": dtypes}
    result = run(grade, average_and_record, inputs, dtype=dtype, **arguments)
    return result, gradients


# --- what is recorded ---


class Sending(NamedTuple):
    """A tensor that a rank sends, and the entries that it has recorded before."""

    call: Call
    entries: list[dict[str, str]]


def sendings(result: Result, rank: int) -> list[list[Sending]]:
    """Return what a rank sends: [iteration][tensor]."""
    iterations: list[list[Sending]] = []
    for event, calls in phases(result, rank):
        if event.name == "begin":
            iterations.append([])
        entries = event.data.get("entries", [])
        iterations[-1] += [Sending(call, entries) for call in calls if call.name == "all_reduce"]
    return iterations


def entry_of(call: Call) -> dict[str, str]:
    """Return the right entry for a tensor."""
    elements = math.prod(call.shape)
    size = elements * BYTES.get(call.dtype, 4)
    return {"class": "dict", "shape": str(list(call.shape)), "dtype": call.dtype, "elements": str(elements),
            "bytes": str(size)}  # fmt: skip


def value_of(name: str, value: object, mistakes: Mapping[str, object]) -> Expected:
    """Expect a value. If a known mistake leaves the one that we got, the message ends with this mistake."""
    sentence = f"{name}: expected {{expected}}, got {{got}}"
    return Expected(value, sentence, mistakes={f"{sentence}: {cause}": left for cause, left in mistakes.items()})


def check_entries(grade: Grade, where: str, entries: list[dict[str, str]], sent: list[Sending], dtype: str) -> None:
    """Check that there is one entry for each tensor that is sent, with its values. `dtype`: what was asked for."""
    check(grade, where, {"entries": len(entries)}, {"entries": number_of_entries(len(sent))})
    of_gradient = "record the tensor that is sent, not the gradient it was made from"
    same_object = "all entries are the same object: create a new dict for each"
    last = entry_of(sent[-1].call) if sent else {}  # if all entries are one dict, each has the values of the last one
    got = {(number, name): value for number, entry in enumerate(entries, 1) for name, value in entry.items()}
    expected: dict[tuple[int, str], Expected] = {}
    for number, sending in enumerate(sent, 1):
        right = entry_of(sending.call)
        elements, first = int(right["elements"]), str(next(iter(sending.call.shape), 1))
        mistakes: dict[str, Fields] = {
            "dtype": {of_gradient: "float32", f"that is what was asked for, but not what is sent: {CONVERT}": dtype},
            "elements": {f"that is the first dimension of {right['shape']}: use numel()": first},
            "bytes": {
                f"those are 4 bytes for each element, but {sending.call.dtype} has {BYTES.get(sending.call.dtype, 4)}: "
                "take element_size() of the tensor that is sent": str(4 * elements),
                "an element takes more than one byte, see element_size()": str(elements),
                "those are bits": str(8 * int(right["bytes"])),
                "that is the memory behind the tensor, which may be a part of it": str(2 * int(right["bytes"])),
            },
        }
        for name, value in right.items():
            causes = mistakes.get(name, {}) | {same_object: last[name]}
            expected[number, name] = value_of(f"entry {number}: {name}", value, causes)
        expected[number, "class"] = Expected("dict", "expected a dict for each tensor in `sent`, got a {got}")
    check(grade, where, got, expected)


def number_of_entries(tensors: int) -> Expected:
    sentence = "{got} entries for {expected} tensors that were sent: append exactly one entry for each"
    return Expected(tensors, sentence, mistakes={"nothing was appended to `sent`, but {expected} tensors were sent": 0})


def check_recorded_first(grade: Grade, where: str, sent: list[Sending]) -> None:
    """Check that the entry of a tensor is there when the tensor is sent. Its values must be right by then: a rank could
    report any number of entries."""
    for number, (call, entries) in enumerate(sent):
        is_recorded = number < len(entries) and entries[number] == entry_of(call)
        if not is_recorded:
            advice = "append the entry before you send"
            grade.fail(f"{where}tensor {number + 1} was sent before it was recorded; {advice}")


def check_recorded(grade: Grade) -> None:
    """Check that each rank records its own gradients, as they are sent, in every iteration."""
    for ranks, dtype, setting in ((3, "float32", ODD), *((2, dtype, PLAIN) for dtype in HALF), (2, "float32", LARGE)):
        result, gradients = synced(grade, ranks, dtype, setting)
        for rank, left in enumerate(result.values):
            for number, sent in enumerate(sendings(result, rank)):
                where = f"rank {rank}, iteration {number + 1}, --grad_dtype {FLAGS[dtype]}: "
                check_entries(grade, where, left[number]["sent"], sent, dtype)
                check_recorded_first(grade, where, sent)
                own = [one for one in gradients[rank][number] if one is not None]
                if not same_numbers([sending.call.sent_arrays() for sending in sent], own):
                    grade.fail(observed=f"{where}what is passed to all_reduce is not the gradients of this rank")
        must_be_own_calls(grade, result, averaging.BY_HAND)


# --- what is left ---


def check_mean(grade: Grade, ranks: int, dtype: str = "float32", setting: AveragingSetting = ODD) -> None:
    """Check that every rank holds the mean in float32, and has the entries: the mean alone is task 2b's lesson."""
    result, gradients = synced(grade, ranks, dtype, setting)
    averaging.check_each_call(grade, setting, result, gradients, f"--grad_dtype {FLAGS[dtype]}: ")
    for rank, left in enumerate(result.values):
        for number, sent in enumerate(sendings(result, rank)):
            expected = {"entries": number_of_entries(len(sent))}
            check(grade, f"rank {rank}: ", {"entries": len(left[number]["sent"])}, expected)
    must_be_own_calls(grade, result, averaging.BY_HAND)


def check_bytes(grade: Grade, dtype: str) -> None:
    """Check that every gradient is sent once, in this dtype."""
    result, gradients = synced(grade, 2, dtype, PLAIN)
    for rank, own in enumerate(gradients):
        for call in result.ranks[rank].calls:
            if call.name == "all_reduce" and call.dtype != dtype:
                grade.fail(f"rank {rank} sends a tensor of {call.dtype} ({call.where}), expected {dtype}: {CONVERT}")
        size = BYTES[dtype] * sum(one.size for call in own for one in call)
        what = f"each gradient, as {FLAGS[dtype]},"
        check_sent(grade, rank, result.ranks[rank].calls, {"all_reduce": Sent(size)}, what)


# --- the graded tests ---


@graded("4.1")
def test_every_tensor_is_written_down_as_it_is_sent(grade: Grade) -> None:
    check_recorded(grade)


@graded("4.1")
def test_gradients_travel_in_the_precision_asked_for(grade: Grade) -> None:
    for dtype in HALF:
        check_bytes(grade, dtype)
        check_mean(grade, 2, dtype, PLAIN)


@graded("4.1")
def test_in_full_precision_every_worker_has_the_mean(grade: Grade) -> None:
    for ranks, setting in ((3, ODD), (4, PLAIN), (2, LARGE), (1, ODD), (2, MIXED), (2, INFINITE)):
        check_mean(grade, ranks, setting=setting)
    grade.imports_only_allowed(FILE)
