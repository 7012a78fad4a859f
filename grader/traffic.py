"""Judges task 4: what was written down against the broker's own count, and expectations against the arithmetic."""

import math
from typing import Any

import numpy as np

from grader import draws
from grader.averages import check_means
from grader.calls import Call
from grader.grading import Grade
from grader.outcome import Result

SETTING: dict[str, Any] = {"shapes": [*map(list, draws.SHAPES), [6, 2]], "frozen": [2], "without": [4]}
KEPT = [k for k in range(len(SETTING["shapes"])) if k not in (*SETTING["frozen"], *SETTING["without"])]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ELEMENTS = sum(int(np.prod(SETTING["shapes"][k])) for k in KEPT)


def synced(grade: Grade, world_size: int, dtype: str) -> Result:
    result = grade.run("grader.probes_traffic:sync", world_size, dtype=dtype, **SETTING)
    grade.must_return(result)
    return result


def check_written_down(grade: Grade) -> None:
    """In every iteration and on every rank, one entry before each all_reduce, of the tensor that is sent."""
    for world_size, dtype in ((3, "fp32"), (2, "bf16"), (2, "fp16")):
        result = synced(grade, world_size, dtype)
        for rank in result.ranks:
            for number, (events, calls) in enumerate(_iterations(rank.events), 1):
                where = f"rank {rank.rank}, iteration {number}, --grad_dtype {dtype}"
                _compare_entries(grade, where, events, calls)


def _iterations(events: list) -> list[tuple[list, list[Call]]]:
    """Per iteration: entries and calls in their order, and the calls alone."""
    found: list[tuple[list, list[Call]]] = []
    for event in events:
        if event.name == "iteration":
            found.append(([], []))
        elif found and event.name == "entry":
            found[-1][0].append(event.data["entry"])
        elif found and isinstance(event, Call) and event.name == "all_reduce":
            found[-1][0].append(event)
            found[-1][1].append(event)
    return found


def _compare_entries(grade: Grade, where: str, events: list, calls: list[Call]) -> None:
    entries = [event for event in events if isinstance(event, dict)]
    if not entries:
        grade.fail(f"{where}: nothing was appended to `sent`, and {len(calls)} tensors were sent")
    if len(entries) != len(calls):
        few = "each tensor that is sent gets an entry" if len(entries) < len(calls) else "each gets one, once"
        grade.fail(f"{where}: {len(entries)} entries for {len(calls)} tensors that were sent: {few}")
    for number, (entry, call) in enumerate(zip(entries, calls, strict=True), 1):
        size = math.prod(call.shape) * BYTES.get(call.dtype, 4)
        right = {"shape": list(call.shape), "dtype": call.dtype, "elements": math.prod(call.shape), "bytes": size}
        for name, value in right.items():
            if entry.get(name) != value:
                hint = _entry_hint(name, entry, right)
                grade.fail(
                    f"{where}: entry {number} says {name} {entry.get(name)!r}, "
                    f"but the tensor that all_reduce was given has {value!r}{hint}"
                )
    written = sent = 0
    for event in events:
        written, sent = written + isinstance(event, dict), sent + isinstance(event, Call)
        if sent > written:
            grade.fail(f"{where}: tensor {sent} was sent before it was written down; write first, then send")


def _entry_hint(name: str, entry: dict, right: dict) -> str:
    if name == "bytes" and entry["bytes"] == right["elements"]:
        return ": an element takes more than one byte, see element_size()"
    if name == "bytes" and entry["bytes"] == 8 * right["bytes"]:
        return ": those are bits"
    if name in ("dtype", "bytes") and right["dtype"] != "float32":
        return ": write down the tensor that travels, not the gradient that it was made from"
    return ""


def check_precision(grade: Grade) -> None:
    """The broker's bytes follow --grad_dtype; gradients stay float32 and hold the mean as well as the dtype allows."""
    for dtype, error in (("bf16", 2e-2), ("fp16", 3e-3)):
        result = synced(grade, 3, dtype)
        for mine in result.ranks:
            sent = sum(call.sent for call in mine.calls if call.name == "all_reduce")
            expected = 2 * ELEMENTS * BYTES[NAMES[dtype]]  # two iterations
            if sent != expected:
                what = f"--grad_dtype {dtype}: rank {mine.rank} hands {sent} bytes to all_reduce"
                grade.fail(f"{what}, expected {expected}: {sent / expected:.2f} times as much")
        for rank, value in enumerate(result.values):
            if wrong := [kind for kind in value["dtypes"] if kind not in (None, "float32")]:
                what = f"gradients are {wrong[0]} afterwards on rank {rank}"
                grade.fail(f"--grad_dtype {dtype}: {what}; the optimizer needs float32")
            for k, mean in _means(grade, 3).items():
                got = value["grads"][k]
                if got is None or float(np.abs(got - mean).max()) > error * (1 + float(np.abs(mean).max())):
                    grade.fail(
                        f"--grad_dtype {dtype}: on rank {rank} parameter {k} is not the mean of all gradients: "
                        "did the sum get back into param.grad, and was it divided by world_size?"
                    )


def _means(grade: Grade, world_size: int) -> dict[int, np.ndarray]:
    inputs = [draws.gradients(grade.seed, rank, SETTING["shapes"]) for rank in range(world_size)]
    return {k: np.mean([mine[k] for mine in inputs], axis=0) for k in KEPT}


def check_mean(grade: Grade) -> None:
    """In fp32 nothing changes: every rank holds the mean."""
    for world_size in (3, 4):
        result = synced(grade, world_size, "fp32")
        inputs = [draws.gradients(grade.seed, rank, SETTING["shapes"]) for rank in range(world_size)]
        got = [value["grads"] for value in result.values]
        check_means(grade, result, [[g[k] for k in KEPT] for g in got], [[i[k] for k in KEPT] for i in inputs], KEPT)


# ---------------------------------------------------------------------------------------- expectations


def check_gradient_bytes(grade: Grade) -> None:
    """Shared tensors once, frozen and unused ones not at all, and the dtype's size."""
    count: list[int] = []
    while len({*count[1:5:2], *count[4:5], sum(count[1:5:2])}) < 4:  # so that no wrong sum looks like another
        shapes = [[int(n) for n in grade.draw.integers(2, 9, size=2)] for _ in range(5)] + [[7]]
        count = [int(np.prod(shape)) for shape in shapes]
    setting = {"shapes": shapes, "frozen": [1], "without": [3], "tied": [4]}
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        got = grade.values("grader.probes_traffic:gradient_bytes", 1, dtype=dtype, **setting)[0]
        expected = size * (count[0] + count[2] + count[4] + count[5])
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
    """2(N-1)/N S, out and in."""
    for n in (7, 3, 2, 4):  # 7 first: there no wrong factor looks like another
        size = 12 * int(grade.draw.integers(1000, 9000)) * n
        got = grade.values("grader.probes_traffic:traffic", 1, function="all_reduce_traffic", cases=[[size, n]])[0][0]
        right = 2 * (n - 1) * size / n
        causes = {
            "that is the tensor itself, without the factor of the ring": size,
            "that is half: a piece goes round twice, once to add and once to hand out": right / 2,
            "that is the sum over all workers, and one worker was asked for": right * n,
            "that is what a root would send that hands the sum to all": (n - 1) * size,
            "that is twice the tensor, which a ring comes near to but does not reach": 2 * size,
            "that is sent and received added up": 2 * right,
            "those are bits": 8 * right,
        }
        _compare(grade, f"all_reduce of {size} bytes on {n} workers", got, (right, right), causes)


def check_gather_scatter(grade: Grade) -> None:
    """(N-1) S at rank 0, S elsewhere."""
    for n in (3, 4, 2):
        size = 4 * int(grade.draw.integers(1000, 9000))
        cases = [[size, n, rank] for rank in range(n)]
        values = grade.values("grader.probes_traffic:traffic", 1, function="gather_scatter_traffic", cases=cases)[0]
        for rank, got in enumerate(values):
            right = size * (n - 1 if rank == 0 else 1)
            causes = {
                "rank 0's own tensor does not travel": size * n,
                "that is what rank 0 moves; the others talk to rank 0 only": size * (n - 1),
                "that is what the others move; rank 0 talks to each of them": size,
                "that is an all_reduce": 2 * (n - 1) * size / n,
                "that is sent and received added up": 2 * right,
            }
            _compare(
                grade, f"gather and scatter of {size} bytes on {n} workers, rank {rank}", got, (right, right), causes
            )


def _compare(grade: Grade, what: str, got: list, right: tuple[float, float], causes: dict[str, float]) -> None:
    for way, mine, expected in zip(("sent", "received"), got, right, strict=True):
        if not math.isclose(mine, expected, rel_tol=1e-4, abs_tol=1):
            cause = next(
                (f": {words}" for words, value in causes.items() if math.isclose(mine, value, rel_tol=1e-4)), ""
            )
            grade.fail(f"{what}: expected {expected:.0f} bytes {way}, got {mine:.0f}{cause}")


def check_iterations(grade: Grade) -> None:
    """Padded shares, and a last batch that may be short."""
    for examples, batch, n in (
        (2490, 16, 4),
        (10, 1, 4),
        (10, 3, 4),
        (22, 7, 3),
        (int(grade.draw.integers(100, 900)), 7, 3),
        (64, 16, 2),
    ):
        got = grade.values("grader.probes_traffic:iterations", 1, cases=[[examples, batch, n]])[0][0]
        share = math.ceil(examples / n)
        causes = {
            "the last batch, which is not full, counts too": share // batch,
            "that many one worker alone would make": math.ceil(examples / batch),
            "a part of an iteration is not possible": share / batch,
            "the sampler pads: examples that do not divide are one more on every worker": math.ceil(
                examples // n / batch
            ),
        }
        if got != math.ceil(share / batch):
            cause = next((f": {words}" for words, value in causes.items() if abs(value - got) < 0.01), "")
            grade.fail(
                f"{examples} examples on {n} workers, {batch} in a worker's batch: "
                f"expected {math.ceil(share / batch)} iterations, got {got:g}{cause}"
            )


def check_epoch(grade: Grade) -> None:
    """An iteration's traffic as often as the file itself counts iterations; smaller batches send more in an epoch."""
    sent, received = (float(n) for n in grade.draw.integers(10_000, 90_000, size=2))
    for batch in (16, 8, 4):
        values = grade.values("grader.probes_traffic:epoch", 1, cases=[[[sent, received], 2490, batch, 4]])[0][0]
        iterations = values.pop()
        words = f"an epoch of {iterations:g} iterations"
        causes = {
            "that is one iteration": sent,
            "that is the sum over all workers": sent * iterations * 4,
            "bytes of an iteration do not depend on the batch: gradients have the size of the model": sent
            * iterations
            * batch,
            "bytes of an iteration do not depend on the number of examples": sent * 2490,
        }
        _compare(grade, words, values, (sent * iterations, received * iterations), causes)
