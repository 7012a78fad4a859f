"""Judges region 4.1: what was written down, against the tensors that the broker has really got from each rank."""

import math

import numpy as np

from grader.call_checks import Payloads, must_be_own_calls
from grader.checks import diagnosis, reference
from grader.compare import check
from grader.grading import Grade
from grader.numbers import norm
from grader.ranks.calls import Call
from grader.ranks.outcome import RankResult, Result
from grader.wire import drawn
from grader.wire.values import Fields
from tests.gradients.test_averaging import BY_HAND, mean_of

SETTING: Fields = {"shapes": [*map(list, drawn.SHAPES), [6, 2]], "frozen": [2], "without": [4]}
LARGE: Fields = {"shapes": [[3], [700, 800], [2, 4]], "frozen": [], "without": []}  # 2.2 MB beside some bytes
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# A rounded number is off by so much of itself; a sum of a few of them, divided, by three times as much.
ROUNDING = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}
ITERATIONS = 2


def kept(setting: dict) -> list[int]:
    """The parameters that have a gradient."""
    return [k for k in range(len(setting["shapes"])) if k not in (*setting["frozen"], *setting["without"])]


def inputs(grade: Grade, world_size: int, setting: dict) -> list[list[list[np.ndarray]]]:
    """[rank][iteration][parameter]: the gradients that a rank starts with, and no other rank knows."""
    return [
        [drawn.gradients(grade.seed + 7919 * number, rank, setting["shapes"]) for number in range(ITERATIONS)]
        for rank in range(world_size)
    ]


def synced(grade: Grade, world_size: int, dtype: str, setting: dict = SETTING) -> Result:
    each = inputs(grade, world_size, setting)
    result = grade.run("grader.probes.traffic:sync", world_size, payloads=True, each=each, dtype=dtype, **setting)
    grade.must_return(result)
    return result


def check_written_down(grade: Grade) -> None:
    """In every iteration and on every rank, one entry before each all_reduce, of the tensor that is sent."""
    for world_size, dtype, setting in (
        (3, "fp32", SETTING),
        (2, "bf16", SETTING),
        (2, "fp16", SETTING),
        (2, "fp32", LARGE),
    ):
        result = synced(grade, world_size, dtype, setting)
        each = inputs(grade, world_size, setting)
        for rank, value in zip(result.ranks, result.values, strict=True):
            for number, calls in enumerate(_iterations(rank)):
                where = f"rank {rank.rank}, iteration {number + 1}, --grad_dtype {dtype}"
                _compare_entries(grade, where, value["sent"][number], calls)
                own = [each[rank.rank][number][k] for k in kept(setting)]
                check_payload(grade, where, calls, own, dtype)
            _check_order(grade, f"rank {rank.rank}, --grad_dtype {dtype}", rank)
        must_be_own_calls(grade, result, BY_HAND)


def _iterations(rank: RankResult) -> list[list[Call]]:
    """The all_reduces of each iteration."""
    found: list[list[Call]] = []
    for event in rank.events:
        if event.name == "iteration":
            found.append([])
        elif found and isinstance(event, Call) and event.name == "all_reduce":
            found[-1].append(event)
    return found


def _must_have_written(grade: Grade, result: Result) -> None:
    """What is sent counts only beside what is written down of it: that is the lesson, the mean is task 2b's."""
    for rank, value in zip(result.ranks, result.values, strict=True):
        for entries, calls in zip(value["sent"], _iterations(rank), strict=True):
            if len(entries) != len(calls):
                grade.fail(
                    f"rank {rank.rank}: {len(entries)} entries in `sent` for {len(calls)} tensors that were sent; this "
                    "test counts only when every tensor that is sent is recorded"
                )
    must_be_own_calls(grade, result, BY_HAND)


def _check_order(grade: Grade, where: str, rank: RankResult) -> None:
    """Fails if the list was shorter, when a tensor was sent, than the number of tensors sent by then."""
    sent = 0
    for event in rank.events:
        sent = 0 if event.name == "iteration" else sent
        if event.name == "entries":
            sent += 1
            if event.data["count"] < sent:
                grade.fail(f"{where}: tensor {sent} was sent before it was recorded; append the entry before you send")


def _compare_entries(grade: Grade, where: str, entries: list[dict], calls: list[Call]) -> None:
    if not entries:
        grade.fail(f"{where}: nothing was appended to `sent`, but {len(calls)} tensors were sent")
    if len(entries) != len(calls):
        few = "append one entry for each tensor" if len(entries) < len(calls) else "append each tensor only once"
        grade.fail(f"{where}: {len(entries)} entries for {len(calls)} tensors that were sent: {few}")
    if strange := next((entry["not a dict"] for entry in entries if "not a dict" in entry), ""):
        grade.fail(f"{where}: expected a dict for each tensor in `sent`, got a {strange}")
    rights = []
    for call in calls:
        elements = math.prod(call.shape)
        size = elements * BYTES.get(call.dtype, 4)
        rights.append({"shape": list(call.shape), "dtype": call.dtype, "elements": elements, "bytes": size})
    for number, (entry, right) in enumerate(zip(entries, rights, strict=True), 1):
        wrong = next((name for name, value in right.items() if entry.get(name) != value), "")
        if wrong and len(entries) > 1 and all(entry == entries[0] for entry in entries):
            grade.fail(f"{where}: all {len(entries)} entries are the same dict object: create a new one for each")
        if wrong:
            grade.fail(
                f"{where}: entry {number}: {_entry_hint(wrong, entry, right)}{wrong} is {entry.get(wrong)!r}, but the "
                f"tensor passed to all_reduce has {right[wrong]!r}"
            )


def _entry_hint(name: str, entry: dict, right: dict) -> str:
    if name == "bytes" and entry["bytes"] == right["elements"]:
        return "an element takes more than one byte, see element_size(); "
    if name == "bytes" and entry["bytes"] == 8 * right["bytes"]:
        return "those are bits; "
    if name in ("dtype", "bytes") and right["dtype"] != "float32":
        return "record the tensor that is sent, not the gradient it was made from; "
    return ""


def check_payload(grade: Grade, where: str, calls: list[Call], own: list[np.ndarray], dtype: str) -> None:
    """Fails unless the calls carry this rank's gradients, whole or divided already, in any order and cut.

    Zeros do not count: they may fill a buffer up.
    """
    got, right = (_sorted(arrays) for arrays in ([call.sent_arrays() for call in calls], own))
    if len(got) == len(right) and len(right):
        factor = float(np.linalg.norm(got) / np.linalg.norm(right))
        if np.isfinite(factor) and np.allclose(got, factor * right, rtol=3 * ROUNDING[dtype], atol=1e-7):
            return
    grade.fail(f"{where}: what is passed to all_reduce is not the gradients of this rank ({len(got)} nonzero numbers, "
               f"expected {len(right)})")  # fmt: skip


def _sorted(arrays: list[np.ndarray]) -> np.ndarray:
    flat = np.concatenate([np.ravel(array).astype(np.float64) for array in arrays]) if arrays else np.empty(0)
    return np.sort(flat[flat != 0])


def check_precision(grade: Grade) -> None:
    """The broker's bytes follow --grad_dtype; gradients stay float32 and hold the mean as well as the dtype allows."""
    elements = sum(math.prod(SETTING["shapes"][k]) for k in kept(SETTING))
    for dtype in ("bf16", "fp16"):
        result = synced(grade, 3, dtype)
        for mine in result.ranks:
            sent = sum(call.sent for call in mine.calls if call.name == "all_reduce")
            expected = ITERATIONS * elements * BYTES[NAMES[dtype]]
            if sent != expected:
                what = f"--grad_dtype {dtype}: rank {mine.rank} passes {sent} bytes to all_reduce"
                grade.fail(f"{what}, {sent / expected:.2f} times the expected {expected}")
        each = inputs(grade, 3, SETTING)
        for rank, value in enumerate(result.values):
            if wrong := [kind for kind in value["dtypes"] if kind not in (None, "float32")]:
                what = f"gradients are {wrong[0]} afterwards on rank {rank}"
                grade.fail(f"--grad_dtype {dtype}: {what}; the optimizer needs float32")
            for number in range(ITERATIONS):
                for k in kept(SETTING):
                    _check_rounded(grade, dtype, rank, k, value["grads"][number][k], [mine[number][k] for mine in each])
        _must_have_written(grade, result)


def _check_rounded(grade: Grade, dtype: str, rank: int, k: int, got: np.ndarray | None, own: list[np.ndarray]) -> None:
    """Fails unless `got` is the mean of the ranks' gradients, but for rounding; never right: nan, inf, nothing."""
    mean = reference.means([[array] for array in own])[0]
    limit = 3 * ROUNDING[dtype] * np.abs(own).sum(axis=0)
    if got is None or np.shape(got) != mean.shape or not np.all(np.abs(np.asarray(got, np.float64) - mean) <= limit):
        words = diagnosis.parameter_words(f"parameter {k}", got, mean)
        grade.fail(
            f"--grad_dtype {dtype}: on rank {rank} param.grad is not the mean of all gradients: did the sum get back "
            f"into param.grad, and was it divided by world_size?\n{words}"
        )


def check_mean(grade: Grade) -> None:
    """In fp32 nothing changes: every rank holds the mean, in every iteration, for any number of workers and size."""
    for world_size, setting in ((3, SETTING), (4, SETTING), (2, LARGE), (1, SETTING)):
        result = synced(grade, world_size, "fp32", setting)
        each, names, payloads = inputs(grade, world_size, setting), kept(setting), Payloads(result)
        for number in range(ITERATIONS):
            got = {
                (r, f"parameter {k}"): value["grads"][number][k] for r, value in enumerate(result.values) for k in names
            }
            own = {k: [mine[number][k] for mine in each] for k in names}
            total = norm([np.mean(gradients, axis=0) for gradients in own.values()])
            expected = {
                (r, f"parameter {k}"): mean_of(own[k], r, payloads, total) for r in range(world_size) for k in names
            }
            check(
                grade,
                f"expected the mean of {world_size} workers' gradients; on rank {{rank}}, ",
                got,
                expected,
                result,
            )
        for rank, value in enumerate(result.values):
            if value["moved"]:
                grade.fail(f"the parameters themselves changed on rank {rank}: average only param.grad")
            if any(value["grads"][-1][k] is not None for k in (*setting["frozen"], *setting["without"])):
                grade.fail(f"a parameter without a gradient has one afterwards on rank {rank}: leave it out")
        _must_have_written(grade, result)
