"""Shared by the lessons that send gradients during backward: a toy model, its gradients, and when messages are sent.

The gradient of every use of a parameter is drawn for each rank. The toy notes when backward reaches a use
(toy_in_rank.py): the broker has this note and the messages of a rank in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from grader.arithmetic import Tolerance
from grader.call_checks import is_of_grader, waits_for_held_back
from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields, item_bytes, to_array, to_bytes

BYTES = {dtype: item_bytes(dtype) for dtype in ("float32", "float64", "bfloat16")}
ROUNDING = {"float32": 1e-4, "float64": 1e-4, "bfloat16": 2.0**-6}  # of what a message may hold
# MOST messages may be in transit. b.6 and b.10 share this limit: a change for one of them changes the other.
MOST, COPIES = 2, 3  # COPIES of each are in memory: what is sent, what is received, the grader's answer
ONCE = "every rank sends each bucket once, in the order of `buckets`, also one without gradients"
CRASHES = dict.fromkeys(  # torch's words -> what they mean here
    ("The size of tensor a ... missing", "Boolean value of Tensor ... missing"),
    "`missing` is a list, which compares tensors element by element: make it a set",
)
Arrays = list[np.ndarray]
Uses = list[list[list[list[int]]]]  # [step][micro-batch][rank] -> parameters in forward order; last: all other ranks


@dataclass(frozen=True, kw_only=True)
class ToySetting:
    """A model without layers: its parameters, and those that each rank uses in each micro-batch.

    zero, infinite: the parameters whose gradient is zero, and has an inf, only on the last rank.
    """

    shapes: list[list[int]]
    uses: Uses
    dtypes: list[str] = field(default_factory=list)  # empty: float32
    frozen: list[int] = field(default_factory=list)
    tied: int | None = None
    zero: list[int] = field(default_factory=list)
    infinite: list[int] = field(default_factory=list)

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        return [[kinds[min(rank, len(kinds) - 1)] for kinds in micros] for micros in self.uses]

    def dtype(self, k: int) -> str:
        return self.dtypes[k] if self.dtypes else "float32"

    @property
    def arguments(self) -> Fields:
        """Return what every rank needs to build the toy."""
        dtypes = [self.dtype(k) for k in range(len(self.shapes))]
        return {"shapes": self.shapes, "dtypes": dtypes, "frozen": self.frozen, "tied": self.tied}


class Drawn(NamedTuple):
    """What each rank gets: uses and gradients.

    computed: the gradients that backward computes from them, [rank][step][micro-batch][parameter].
    """

    inputs: list[Fields]
    computed: list[list[list[Arrays]]]


def rounded(array: ArrayLike, dtype: str) -> np.ndarray:
    """Return the numbers as a tensor of this dtype holds them, in float64."""
    return to_array(dtype, list(np.shape(array)), to_bytes(np.asarray(array, np.float32), dtype)).astype(np.float64)


def once_in_bfloat16(value: np.ndarray, total: float) -> Tolerance:
    """How far a number may be off that is rounded to bfloat16 once, at the end: 4 times the distance of neighbours.

    Where float32 and float64 are on two sides of a boundary, they round to neighbours, at most 2^-7 of the value apart.
    total: the norm of what it is computed from in float32. A difference of large numbers may be nearly 0, but its error
    is not.
    """
    return Tolerance(limit=2.0**-5 * np.abs(value) + 1e-6 * total)


def draw(seed: int, ranks: int, toy: ToySetting) -> Drawn:
    """Draw the gradient of every use, and compute what backward leaves, rounded to each dtype."""
    all_drawn = Drawn([], [])
    for rank in range(ranks):
        generator = drawn.generator(seed, 14, ranks, rank)
        gradients: list[list[Arrays]] = []
        computed: list[list[Arrays]] = []
        for micros in toy.of_rank(rank):
            gradients.append([])
            computed.append([])
            for uses in micros:
                tensors = [np.asarray(generator.normal(size=toy.shapes[k]), np.float32) for k in uses]
                total = [np.zeros(shape) for shape in toy.shapes]
                for k, tensor in zip(uses, tensors, strict=True):
                    if rank == ranks - 1 and k in toy.zero:
                        tensor *= 0
                    if rank == ranks - 1 and k in toy.infinite:
                        tensor.flat[0] = np.inf
                    if k not in toy.frozen:
                        dtype = toy.dtype(k)
                        total[k] = rounded(total[k] + rounded(tensor, dtype), dtype)
                gradients[-1].append(tensors)
                computed[-1].append(total)
        all_drawn.inputs.append({"uses": toy.of_rank(rank), "gradients": gradients})
        all_drawn.computed.append(computed)
    return all_drawn


# --- when messages are sent ---


class Send(NamedTuple):
    """A message: how many gradients backward had reached before it, and whether backward had ended."""

    reached: int
    ended: bool
    call: Call


@dataclass
class MicroBatch:
    """What one rank did from the beginning of a micro-batch to the beginning of the next one.

    reached: the parameters in the order in which backward reached their gradients.
    """

    step: int
    number: int
    reached: list[int] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)


def micro_batches(grade: Grade, result: Result, toy: ToySetting, rank: int) -> list[MicroBatch]:
    """Return the micro-batches of a rank, in order, with its messages. Fail if backward did not reach each gradient."""
    uses, micros, ended = toy.of_rank(rank), list[MicroBatch](), True
    for event in result.ranks[rank].events:
        if event.name == "backward":
            micros.append(MicroBatch(event.data["step"], event.data["micro"]))
            ended = False
        elif event.name == "backward ended":
            ended = True
        elif event.name == "reached" and micros:
            step, number, use = map(int, event.data["key"].split())
            micros[-1].reached.append(uses[step][number][use])
        elif micros and isinstance(event, Call) and is_message(event):
            micros[-1].sends.append(Send(len(micros[-1].reached), ended, event))
    for micro in micros:
        if micro.reached != [k for k in reversed(uses[micro.step][micro.number]) if k not in toy.frozen]:
            grade.fail(
                observed=f"step {micro.step}: rank {rank} does not compute the gradients in the order of backward"
            )
    return micros


def check_times(
    grade: Grade, where: str, micro: MicroBatch, buckets: Sequence[Sequence[int]], sends: Iterable[tuple[int, Send]],
    advice: str,
) -> None:  # fmt: skip
    """Check that a bucket is sent once its last gradient and all buckets before it are ready, before the next gradient.

    sends: each message with the number of its bucket.
    """
    places = {k: place for place, k in enumerate(micro.reached, 1)}
    total, sends = len(micro.reached), list(sends)
    due = 0
    for i, bucket in enumerate(buckets):
        due = max(due, *(places.get(k, total + 1) for k in bucket))  # above the total: backward does not complete it
        for reached, ended, call in (send for number, send in sends if number == i):
            if due <= total and (ended or reached > due):
                late = "after backward has ended" if ended else f"after {reached} of {total} gradients"
                grade.fail(
                    f"{where} sends bucket {i} {late} ({call.where}), expected right after gradient {due} of {total}: "
                    f"it is complete then, and all buckets before it have been sent. {advice}"
                )


def check_order(grade: Grade, where: str, sent: list[int], count: int, place: str) -> None:
    """Check that a rank sends all its buckets in their order. `place`: the line that sends the first one."""
    expected = list(range(count))
    if sent == expected:
        return
    cause = "they are sent in a different order: all ranks must send in the order of `buckets`"
    if not sent:
        cause = "no bucket is sent: is the hook called for every parameter, and does it send?"
    elif len(set(sent)) < len(sent):
        cause = "buckets are sent more than once: send only those that have not been sent yet"
    elif len(sent) < count:
        every = "some are missing: when a bucket is complete, send it and all complete ones after it, in a loop (while)"
        cause = "the last bucket is never sent" if sent == expected[:-1] else every
    grade.fail(
        f"{where} sends the buckets {sent}{f' ({place})' if place else ''}, expected {expected} in this order: {cause}"
    )


def check_together(grade: Grade, where: str, calls: Sequence[Call], advice: str) -> None:
    """Check that a rank sends all messages before it waits for one of them, so that they travel together."""
    for before, call in combinations(calls, 2):
        if not before.in_transit(call):
            grade.fail(
                f"{where} waits for {before.name} #{before.number} before it sends {call.name} #{call.number} "
                f"({call.where}): {advice}"
            )


def check_in_transit(
    grade: Grade, where: str, sends: Sequence[tuple[int, Call]], sizes: Sequence[int], name: Callable[[int], str]
) -> None:
    """Check that at most MOST buckets are in transit, and that the oldest is received first.

    sends: each call with its bucket, in their order; sizes: the elements of each bucket.
    """
    in_transit = [{other for other, earlier in sends if earlier.in_transit(call)} for _, call in sends]
    for (bucket, call), alive in zip(sends, in_transit, strict=True):
        if len(alive) > MOST:
            gradients = sum(sizes[other] for other in alive)
            grade.fail(
                f"{where} sends {name(bucket)} ({call.where}) while the messages of {len(alive) - 1} others are in "
                f"transit: {len(alive)} messages with {gradients} of {sum(sizes)} gradients are in memory; expected at "
                f"most {MOST}: receive the oldest, then send the next one"
            )
    for place, ((bucket, call), alive) in enumerate(zip(sends, in_transit, strict=True)):
        in_order = list(dict.fromkeys(other for other, _ in sends[:place]))
        received = [other for other in in_order if other not in alive]
        if received and received != in_order[: len(received)]:
            oldest = next(other for other in in_order if other in alive)
            grade.fail(
                f"{where} receives {name(received[-1])} while {name(oldest)}, which was sent before it, is still in "
                f"transit when it sends {name(bucket)} ({call.where}): receive the older one, which has had more time"
            )


def why_backward_is_stuck(result: Result) -> str:
    """Say why no rank can continue, in lessons whose hooks may wait; "" if it is no known mistake."""
    return why_hooks_are_stuck(result, "wait only for an older message, before you send")


def why_hooks_are_stuck(result: Result, where_to_wait: str) -> str:
    """Say why no rank can continue; "" if it is no known mistake.

    Either a rank waits for a message while the grader holds another rank back, or ranks send different numbers of
    messages. The broadcast of the weights at the beginning is not counted.
    """
    if waits := waits_for_held_back(result):
        return (
            f"{waits} while backward still has gradients to compute: a hook must not wait for what it has just sent: "
            f"send with async_op=True, and {where_to_wait}"
        )
    buckets = [[call for call in rank.calls if is_message(call) and call.name != "broadcast"] for rank in result.ranks]
    sent = list(map(len, buckets))
    least, most = sent.index(min(sent)), sent.index(max(sent))
    if sent[least] == sent[most]:
        return ""
    counts = f"rank {most} sends {sent[most]} messages, but rank {least} sends {sent[least]}"
    return (
        f"{counts}: {ONCE}. In the hook, send every complete bucket, in a loop; in finish(), all that are left, also "
        "complete ones"
    )


def is_message(call: Call) -> bool:
    return call.name not in ("init_process_group", "barrier") and not is_of_grader(call)
