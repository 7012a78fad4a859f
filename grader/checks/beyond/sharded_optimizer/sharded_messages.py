"""Judges the messages of a sharded optimizer: which gradients they hold, when they are sent, and what they cost.

All of it is the broker's: the messages with their bytes, and between them when each permit was given.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from grader.checks.beyond import in_transit
from grader.checks.beyond.sharded_optimizer.sharded_run import ITEM, OptimizerRun, students_call
from grader.ranks.calls import Call

SMALL = 200  # bytes of a step that may travel beside the shards: a barrier, a number


@dataclass
class Micro:
    """What one rank did in a micro-batch and until the next one.

    given: the parameters in the order in which backward came to them. sends: (how many had been given, whether backward
    had ended, the call).
    """

    step: int
    micro: int
    given: list[int] = field(default_factory=list)
    sends: list[tuple[int, bool, Call]] = field(default_factory=list)


def read(run: OptimizerRun, rank: int) -> list[Micro]:
    """The micro-batches of a rank, in order."""
    uses, micros = run.setting.of_rank(rank), list[Micro]()
    ended = False
    for event in run.result.ranks[rank].events:
        if event.name == "backward":
            micros.append(Micro(event.data["step"], event.data["micro"]))
            ended = False
        elif event.name == "backward ended":
            ended = True
        elif event.name == "given":
            step, micro, use = map(int, event.data["key"].split())
            if asked_now(run, rank, (step, micro, use), None if ended or not micros else micros[-1]):
                micros[-1].given.append(uses[step][micro][use])
        elif students_call(event) and isinstance(event, Call) and micros:
            micros[-1].sends.append((len(micros[-1].given), ended, event))
    return micros


def asked_now(run: OptimizerRun, rank: int, place: tuple[int, int, int], running: Micro | None) -> bool:
    """Fails for a permit (step, micro-batch, use) out of turn: it is backward that asks, for the last use first."""
    turn = None
    if running and len(running.given) < len(open_uses := trained_uses(run, rank, running)):
        turn = (running.step, running.micro, open_uses[-1 - len(running.given)])
    if place != turn:
        run.grade.fail(f"rank {rank} asks for the gradients of step {place[0]} before its backward computes them")
    return True


def trained_uses(run: OptimizerRun, rank: int, micro: Micro) -> list[int]:
    """The uses in a micro-batch that need a gradient, in the order of forward."""
    uses = run.setting.of_rank(rank)[micro.step][micro.micro]
    return [use for use, k in enumerate(uses) if k not in run.setting.frozen]


# --- what is in them, and when they leave ---


def check_sent(run: OptimizerRun) -> None:
    """Each rank sends its own gradients, all buckets in their order; stage 1 in finish(), stage 2 during backward."""
    messages = list[tuple[str, list[tuple[int, Call]]]]()
    for rank in range(run.n):
        micros = read(run, rank)
        for micro in micros:
            last = micro.micro == len(run.setting.uses[micro.step]) - 1
            where = f"step {micro.step}, micro-batch {micro.micro}: rank {rank}"
            if run.setting.stage == 1:
                _check_silence(run, micro, where, last)
            if run.setting.stage == 2 or last:
                held = _check_order(run, rank, micro, where)
                messages.append((where, [(i, call) for i, (*_, call) in zip(held, micro.sends, strict=True)]))
                if run.setting.stage == 2:
                    _check_times(run, micro, held, where)
    sizes = [sum(run.initial[k].size for k in bucket) for bucket in run.buckets]
    for where, sends in messages:
        in_transit.check(run.grade, where, sends, sizes, "bucket {}".format)


def _check_silence(run: OptimizerRun, micro: Micro, where: str, last: bool) -> None:
    early = [call for _, ended, call in micro.sends if not ended or not last]
    if early:
        run.grade.fail(f"{where} sends during backward ({early[0].where}): stage 1 sends only in the last finish()")


def _check_order(run: OptimizerRun, rank: int, micro: Micro, where: str) -> list[int]:
    """The bucket of each message."""
    held = held_by(run, rank, micro)
    for bucket, (*_, call) in zip(held, micro.sends, strict=True):
        if bucket is None:
            words = (
                "its gradients in a different order than flat.values"
                if _mixed(run, rank, micro, call)
                else "other values"
            )
            advice = ""
            if not np.any(_numbers(call)):
                words, advice = "zeros", "; send each bucket once, when its gradients are ready"
            run.grade.fail(
                f"{where} sends {words} ({call.name}, {call.where}), expected its own gradients of one bucket, as "
                f"take_gradients returns them{advice}"
            )
    known = [bucket for bucket in held if bucket is not None]
    order = [bucket for bucket, _ in groupby(bucket for bucket in known if bucket >= 0)]
    expected = list(range(len(run.buckets)))
    if order == expected:
        return known
    text = " ".join(map(str, order)) or "none"
    line = f" ({micro.sends[0][2].where})" if micro.sends else ""
    cause = "all ranks must send in the order of self.buckets: a bucket that is complete before its turn waits"
    if not order:
        cause = "send() must start the collective"
    elif len(order) > len(set(order)):
        cause = "send each bucket once"
    elif len(order) < len(expected):
        cause = "send every bucket, even one without gradients"
    run.grade.fail(f"{where} sends the buckets {text}{line}, expected 0 to {expected[-1]} in this order: {cause}")


def held_by(run: OptimizerRun, rank: int, micro: Micro) -> list[int | None]:
    """The bucket whose shards each message of this rank holds; -1 for one without numbers, None for other numbers."""
    held, every = list[int | None](), [run.rows(rank, micro.step, micro.micro, i) for i in range(len(run.buckets))]
    current = 0
    for *_, call in micro.sends:
        sent = _numbers(call)
        if not sent.size or call.name == "barrier":
            held.append(-1)
            continue
        fits = [i for i, rows in enumerate(every) if _holds(sent, rows, run.setting.dtype(run.buckets[i][0]))]
        held.append(next((i for i in fits if i >= current), fits[0] if fits else None))  # zeros fit several
        current = current if held[-1] is None else held[-1]
    return held


def _holds(sent: np.ndarray, rows: np.ndarray, dtype: str) -> bool:
    """Whether a message holds rows of these and no more, divided by the number of ranks already or not."""
    n, length = rows.shape
    if sent.size % length or (sent.size not in (length, rows.size) and not np.any(sent)):
        return False
    slack = 0.01 if dtype == "bfloat16" else 1e-5
    return all(
        any(np.allclose(part * factor, row, rtol=slack, atol=slack) for row in rows for factor in (1, n))
        for part in sent.reshape(-1, length)
    )


def _numbers(call: Call) -> np.ndarray:
    return call.sent_arrays().ravel().astype(np.float64) if call.payload else np.empty(0)


def _mixed(run: OptimizerRun, rank: int, micro: Micro, call: Call) -> bool:
    sent = np.sort(_numbers(call))
    rows = [np.sort(run.rows(rank, micro.step, micro.micro, i).ravel()) for i in range(len(run.buckets))]
    return any(sent.shape == one.shape and np.allclose(sent, one, rtol=1e-5, atol=1e-5) for one in rows)


def _check_times(run: OptimizerRun, micro: Micro, held: list[int], where: str) -> None:
    """A bucket leaves when its last gradient and all buckets before it are there, and before the next gradient is."""
    places = {k: place for place, k in enumerate(micro.given, 1)}
    due, total = 0, len(micro.given)
    for i, bucket in enumerate(run.buckets):
        due = max(due, *(places.get(k, total + 1) for k in bucket))  # finish() sends what is not complete
        for one, (given, ended, call) in zip(held, micro.sends, strict=True):
            if one == i and due <= total and (ended or given > due):
                late = "after backward has ended" if ended else f"after {given} of {total} gradients"
                run.grade.fail(
                    f"{where} sends bucket {i} {late} ({call.where}), expected right after gradient {due} of {total}: "
                    "it is complete then, and all buckets before it have been sent. The hook must send every "
                    "complete bucket, in a loop"
                )


def check_nothing_waits(run: OptimizerRun) -> None:
    """No message of the gradients is sent by a call that waits; a run with a late rank has come to its end before."""
    for rank in range(run.n):
        for micro in read(run, rank):
            for *_, call in micro.sends:
                if not call.asynchronous and call.payload:
                    run.grade.fail(
                        f"rank {rank} waits in {call.name} #{call.number} ({call.where}): pass async_op=True, and "
                        "keep the handle that it returns"
                    )


# --- what they cost ---


def check_gradient_bytes(run: OptimizerRun) -> None:
    """Each exchange of gradients costs (N-1)/N of their bytes for a rank; bfloat16 may travel as float32."""
    widened = sum(run.bytes_of(i) * (4 // ITEM[run.setting.dtype(bucket[0])]) for i, bucket in enumerate(run.buckets))
    every = [read(run, rank) for rank in range(run.n)]
    for micros in zip(*every, strict=True):
        calls = [call for micro in micros for *_, call in micro.sends]
        where = f"step {micros[0].step}, micro-batch {micros[0].micro}: for the gradients"
        check_price(run, calls, widened, where, "a rank needs only its shard of the sum: reduce_scatter or all_to_all")


def check_price(run: OptimizerRun, calls: Iterable[Call], size: int, where: str, advice: str) -> None:
    """Calls of all ranks together cost at most (N-1)/N of `size` bytes for a rank, and a few bytes more."""
    calls = list(calls)
    mean = sum(call.price for call in calls) / run.n
    right = size - size / run.n
    if mean <= right + SMALL:
        return
    dearest = max(calls, key=lambda call: call.price)
    run.grade.fail(
        f"{where}, each of {run.n} ranks sends {int(mean)} bytes, expected {int(right)}, (N-1)/N of {size} bytes; "
        f"the largest message is {dearest.name} ({dearest.where}): {advice}"
    )
