"""Judges which buckets a gradient reducer sends, in which order, and when: a bucket leaves while backward still runs.

All of it is the broker's: the messages with their bytes, and between them when each permit was given.
"""

from dataclasses import dataclass

import numpy as np

from grader.checks.beyond.reducer.overlap import Reduced
from grader.ranks.calls import Call


@dataclass
class Micro:
    """What one rank did in a micro-batch, or (the last of a step) after it, up to the next.

    given: the parameters in the order in which backward came to them. sends: (how many had been given, whether backward
    had ended, the call).
    """

    given: list[int]
    sends: list[tuple[int, bool, Call]]


def read(reduced: Reduced, rank: int) -> list[list[Micro]]:
    """[step][micro-batch]"""
    uses, steps = reduced.setting.of_rank(rank), list[list[Micro]]()
    ended = False
    for event in reduced.result.ranks[rank].events:
        if event.name == "step":
            steps.append([Micro([], [])])
            ended = False
        elif event.name == "micro-batch ended":
            ended = len(steps[-1]) == len(uses[len(steps) - 1])
            if not ended:
                steps[-1].append(Micro([], []))
        elif event.name == "given":
            step, micro, use = map(int, event.data["key"].split())
            if asked_now(reduced, rank, (step, micro, use), steps):
                steps[-1][-1].given.append(uses[step][micro][use])
        elif isinstance(event, Call) and event.name == "all_reduce" and steps:
            steps[-1][-1].sends.append((len(steps[-1][-1].given), ended, event))
    return steps


def asked_now(reduced: Reduced, rank: int, place: tuple[int, int, int], steps: list[list[Micro]]) -> bool:
    """Fails for a permit (step, micro-batch, use) out of turn: it is backward that asks, for the last use first."""
    turn = None
    if steps:
        now = len(steps) - 1, len(steps[-1]) - 1
        kinds = reduced.setting.of_rank(rank)[now[0]][now[1]]
        uses = [use for use, k in enumerate(kinds) if k not in reduced.setting.frozen]
        given = len(steps[-1][-1].given)
        turn = (*now, uses[-1 - given]) if given < len(uses) else None
    if place != turn:
        reduced.grade.fail(f"rank {rank} asks for the gradients of step {place[0]} before its backward computes them")
    return True


def check_accumulation(reduced: Reduced) -> None:
    """Before the last micro-batch nothing is sent; then every bucket is, once."""
    for rank in range(reduced.n):
        for step, micros in enumerate(read(reduced, rank)):
            for number, micro in enumerate(micros[:-1]):
                if micro.sends:
                    call = micro.sends[0][2]
                    reduced.grade.fail(
                        f"step {step}: rank {rank} sends {len(micro.sends)} messages in micro-batch {number}, under "
                        f"no_sync ({call.where}): only the last micro-batch sends; it sends the sum over all of them"
                    )
    check_contents(reduced)


def check_contents(reduced: Reduced) -> None:
    """Every message holds this rank's gradients of one bucket, in the order of the buckets, divided by their number."""
    for step, buckets in enumerate(reduced.setting.buckets):
        firsts = [[call for *_, call in read(reduced, rank)[step][-1].sends] for rank in range(reduced.n)]
        for rank, calls in enumerate(firsts):
            held = [_holds(reduced, reduced.own[rank][step], call) for call in calls]
            if held == buckets:
                continue
            last = [_holds(reduced, reduced.micros[rank][step][-1], call) for call in calls]
            if last == buckets:
                reduced.grade.fail(
                    f"step {step}: rank {rank} sends only the gradients of the last micro-batch ({calls[0].where}): "
                    "the gradients accumulated under no_sync are lost"
                )
            words = (
                f"step {step}: rank {rank} sends the gradients of parameters {_words(held)}; expected {_words(buckets)}"
            )
            where = f" ({calls[0].where})" if calls else ""
            reduced.grade.fail(_name(held, buckets, reduced, rank) + words + where)


def _holds(reduced: Reduced, gradients: list[np.ndarray], call: Call) -> list[int]:
    """The parameters whose `gradients` are in a message, divided by their number or not; [] if others are, too."""
    rest, found = call.sent_arrays().ravel().astype(np.float64), list[int]()
    slack = 0.02 if call.dtype == "bfloat16" else 1e-5
    while rest.size:
        for k, gradient in enumerate(gradients):
            mine, part = np.ravel(gradient), rest[: gradient.size]
            if k in found or mine.size > rest.size or k in reduced.setting.frozen:
                continue
            if any(np.allclose(part * factor, mine, rtol=slack, atol=slack) for factor in (reduced.n, 1)):
                found.append(k)
                rest = rest[mine.size :]
                break
        else:
            return []
    return found


def _words(buckets: list[list[int]]) -> str:
    return " | ".join(" ".join(map(str, bucket)) or "(other numbers)" for bucket in buckets) or "(nothing)"


def _name(held: list[list[int]], buckets: list[list[int]], reduced: Reduced, rank: int) -> str:
    if not held:
        return "no bucket is sent; "
    if held == buckets[: len(held)]:
        return "the last bucket is never sent; " if len(held) == len(buckets) - 1 else "buckets are missing; "
    if held and len(held) > len(buckets):
        return "buckets are sent more than once; "
    if sorted(held) == sorted(buckets):
        return "the buckets are sent in a different order: all ranks must send in the order of reducer.buckets; "
    if [] in held:
        return "a message does not hold this rank's own gradients (divided by the number of ranks); "
    return "the buckets are not those that make_buckets returns; "


def check_overlap(reduced: Reduced) -> None:
    """A bucket leaves when its last gradient and all buckets before it are there, and before the next gradient is."""
    check_contents(reduced)
    for step, buckets in enumerate(reduced.setting.buckets):
        for rank in range(reduced.n):
            _check_step(reduced, step, rank, buckets, read(reduced, rank)[step][-1])


def _check_step(reduced: Reduced, step: int, rank: int, buckets: list[list[int]], micro: Micro) -> None:
    due, total = 0, len(micro.given)
    for i, (bucket, (given, ended, call)) in enumerate(zip(buckets, micro.sends, strict=True)):
        last_use = {k: place for place, k in enumerate(micro.given, 1)}
        if any(k not in last_use for k in bucket):
            due = total + 1  # finish sends it
        due = max(due, *(last_use.get(k, 0) for k in bucket))
        where = f"step {step}: on rank {rank} bucket {i} (parameters {' '.join(map(str, bucket))}) is sent"
        if due <= total and (ended or given > due):
            words = "Each parameter's hook must send every complete bucket, in a loop"
            if ended and len(reduced.setting.uses[step]) > 1:
                words = "Does no_sync set sync back to True at its end, also after an exception?"
            late = "after backward has ended" if ended else f"after {given} of {total} gradients"
            reduced.grade.fail(
                f"{where} {late} ({call.where}), expected right after gradient {due} of {total}: it is complete then, "
                f"and all buckets before it have been sent. {words}"
            )


def check_finish(reduced: Reduced) -> None:
    """Finish sends all remaining buckets before it waits for one: they travel together."""
    for rank in range(reduced.n):
        for step, micros in enumerate(read(reduced, rank)):
            calls = [call for _, ended, call in micros[-1].sends if ended]
            before = [call for *_, call in micros[-1].sends]
            for call in calls:
                early = [other for other in before if other.posted_at < call.posted_at and not other.in_transit(call)]
                if early:
                    reduced.grade.fail(
                        f"step {step}: in finish, rank {rank} waits for {early[0].name} #{early[0].number} before it "
                        f"sends {call.name} #{call.number} ({call.where}): send all remaining buckets, then wait"
                    )


def check_nothing_waits(reduced: Reduced) -> None:
    """No call of backward is one that waits: a run in which one rank begins last has come to its end, see behind."""
    check_contents(reduced)
    for rank in reduced.result.ranks:
        for call in rank.calls:
            if call.name == "all_reduce" and not call.asynchronous:
                reduced.grade.fail(
                    f"rank {rank.rank} waits in {call.name} #{call.number} ({call.where}): pass async_op=True, and "
                    "keep the handle that it returns"
                )
