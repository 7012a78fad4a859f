"""Judges which collectives a rank makes, and what it passes to them. All evidence is from the broker."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grader.arithmetic import Tolerance, close, flat, same_numbers
from grader.grading import Grade
from grader.ranks.calls import Call, Event
from grader.ranks.outcome import Result
from grader.wire import tags

JOINING = {"init_process_group", "barrier"}  # calls that send no data


class Phase(NamedTuple):
    """An event of the function in the rank, and the calls between it and the next one."""

    event: Event
    calls: list[Call]


def phases(result: Result, rank: int) -> list[Phase]:
    """Divide the calls of a rank at the events that the function in the rank has noted."""
    divided: list[Phase] = []
    for event in result.ranks[rank].events:
        if not isinstance(event, Call):
            divided.append(Phase(event, []))
        elif event.name not in JOINING and divided:
            divided[-1].calls.append(event)
    return divided


def all_calls(result: Result) -> list[Call]:
    return [call for rank in result.ranks for call in rank.calls]


def names_used(calls: Iterable[Call]) -> set[str]:
    """Return the collectives that were called, without joining and barriers."""
    return {call.name for call in calls} - JOINING


def in_words(names: Iterable[str]) -> str:
    return " and ".join(sorted(names)) or "no collective at all"


def must_use(grade: Grade, result: Result, names: set[str]) -> None:
    """Fail unless the ranks use exactly these collectives; a single rank need not call any."""
    used = names_used(all_calls(result))
    if len(result.ranks) > 1 and used != names:
        grade.fail(observed=f"expected {in_words(names)} and nothing else, got {in_words(used)}")


def must_be_own_calls(grade: Grade, result: Result, instead: str) -> None:
    """Fail if a function of a library makes a call: what it computes is not the student's work."""
    for call in all_calls(result):
        if call.inside and call.name not in JOINING and not is_of_grader(call):
            place = f" ({call.where})" if call.where else ""
            grade.fail(f"{call.name} is called inside {call.inside}{place}, not by your own line: {instead}")


class Sent(NamedTuple):
    """What a rank must pass to all its calls of one collective.

    bytes: how many, or at most 2 % more; numbers: their values as in same_numbers, None where only bytes count; root:
    the root of every call, None where any will do.
    """

    bytes: int
    numbers: Sequence[np.ndarray] | None = None
    root: int | None = None


def check_sent(grade: Grade, rank: int, calls: Sequence[Call], expected: Mapping[str, Sent], what: str) -> None:
    """Fail unless a rank uses only these collectives, and passes to each exactly what is expected.

    `what` names that in messages.
    """
    if names_used(calls) - set(expected):
        grade.fail(observed=f"expected {in_words(expected)} and nothing else, got {in_words(names_used(calls))}")
    for name, sent in expected.items():
        own_calls = [call for call in calls if call.name == name]
        if sent.root is not None and (roots := {call.root for call in own_calls} - {sent.root}):
            got = ", ".join(sorted(map(str, roots)))
            grade.fail(observed=f"expected rank {sent.root} to be the root of every {name}, got the roots {got}")
        size = sum(call.sent for call in own_calls)
        if not sent.bytes <= size <= 1.02 * sent.bytes:
            relation = f"{size / sent.bytes:.2f} times the expected {sent.bytes}" if sent.bytes else "expected 0"
            grade.fail(f"rank {rank} passes {size} bytes to {name}, {relation}: send {what} once")
        if sent.numbers is not None and not same_numbers([call.sent_arrays() for call in own_calls], sent.numbers):
            grade.fail(observed=f"what rank {rank} passes to {name} is not {what}")


class Payloads:
    """All numbers that each rank has passed to collectives, to ask whether a tensor was among them."""

    def __init__(self, result: Result) -> None:
        self.ranks = len(result.ranks)
        sending = [[call for call in rank.calls if call.payload and call.name != "broadcast"] for rank in result.ranks]
        self.dtypes = {call.dtype for calls in sending for call in calls}
        self.numbers = [flat([call.sent_arrays() for call in calls]) for calls in sending]

    def include(self, rank: int, tensor: np.ndarray) -> bool:
        """Return whether a rank has sent this tensor, as it is or divided by the number of ranks."""
        numbers = flat([tensor])
        numbers = numbers[np.isfinite(numbers)]
        largest = numbers[np.argsort(-np.abs(numbers))[:4]]  # one number alone is near another tensor's with some draws
        return any(
            all(np.isclose(self.numbers[rank], number / divisor, rtol=1e-5, atol=0).any() for number in largest)
            for divisor in (1, self.ranks)
        )


# --- messages, one by one ---


class ExpectedCall(NamedTuple):
    """One call that a rank must make: a send, a recv, or a collective.

    peer: the other rank of a send or recv; payload: the numbers that are sent; peer_is, payload_is: what messages call
    them; mistakes: sentence -> the numbers that a mistake sends instead; members: the group of a collective; elements:
    how many numbers, where their values do not matter.
    """

    name: str
    peer: int | None = None
    peer_is: str = ""
    payload: np.ndarray | None = None
    payload_is: str = ""
    mistakes: Mapping[str, np.ndarray] = {}
    members: tuple[int, ...] = ()
    elements: int | None = None


PAIRS = {"send": ("sends", "send", "to"), "recv": ("receives", "receive", "from")}
COUNTS = {1: "one", 2: "two", 4: "four"}


def check_calls(
    grade: Grade, where: str, rank: int, calls: Sequence[Call], expected: Sequence[ExpectedCall], advice: str
) -> None:
    """Fail unless a rank makes just these calls; sends and receives may be interleaved in any way."""
    names = [call.name for call in calls]
    pairs = {message.name for message in expected} <= set(PAIRS) and bool(expected)
    if not pairs and names != [message.name for message in expected]:
        wanted = f"{COUNTS.get(len(expected), len(expected))} {expected[0].name}" if expected else "no call"
        got = ", ".join(f"{call.name} ({call.where})" for call in calls[:4]) or "no call"
        grade.fail(f"{where}: expected {wanted}, got {got}: {advice}")
    for name in dict.fromkeys(message.name for message in expected):
        made = [call for call in calls if call.name == name]
        due = [message for message in expected if message.name == name]
        for call in made:
            _check_ends(grade, where, rank, call, due[0], advice)
        if len(made) != len(due):
            grade.fail(f"{where}: rank {rank} {PAIRS[name][0]} {len(made)} messages, expected {len(due)}: {advice}")
        for number, (call, message) in enumerate(zip(made, due, strict=True)):
            _check_payload(grade, f"{where}: rank {rank}", call, message, f" in round {number}" if pairs else "")


def _check_ends(grade: Grade, where: str, rank: int, call: Call, message: ExpectedCall, advice: str) -> None:
    """Fail unless a call goes to the right peer, or to the right group as a sum, and has the right size."""
    if message.peer is not None and call.root != message.peer:
        _, way, preposition = PAIRS[call.name]
        got = f"{call.name} {preposition} rank {call.root} ({call.where})"
        grade.fail(f"rank {rank} must {way} {preposition} {message.peer_is}, rank {message.peer}: got {got}")
    if message.members and set(call.members) != set(message.members):
        got, expected = (", ".join(map(str, members)) for members in (call.members, message.members))
        words = f"expected the group of ranks {expected}, got ranks {got}: pass the group on, group=..."
        grade.fail(f"{where}, {call.name} ({call.where}): {words}")
    if message.elements is not None and math.prod(call.shape) != message.elements:
        words = f"expected {message.elements} numbers, got {math.prod(call.shape)}"
        grade.fail(f"{where}, {call.name} ({call.where}): {words}: {advice}")
    if call.reduce not in (None, "SUM"):
        grade.fail(observed=f"{where}, {call.name} ({call.where}): expected a sum, got {call.reduce}")


def _check_payload(grade: Grade, where: str, call: Call, message: ExpectedCall, round_: str) -> None:
    """Fail unless a call sends the expected numbers; name the mistake that sends these instead."""
    if message.payload is None:
        return
    got, expected = call.sent_arrays().ravel().astype(np.float64), np.ravel(message.payload)
    if not close(got, expected, Tolerance(slack=100.0)):
        what = f"{got.size} elements" if got.shape != expected.shape else "wrong values"
        of = f"{message.payload_is} ({expected.size} elements)"
        verb = PAIRS[call.name][0] if call.name in PAIRS else "passes"
        causes = (
            cause for cause, sent in message.mistakes.items() if close(got, np.ravel(sent), Tolerance(slack=100.0))
        )
        cause = next(causes, "")
        grade.fail(cause, f"{where} {verb} {what}{round_} ({call.where}); expected {of}")


def why_stuck(result: Result, peers: Mapping[str, Sequence[tuple[int, str]]] | None = None) -> str:
    """Say why ranks that exchange messages wait for each other; "" where it is no known mistake.

    `peers`: "send" and "recv" -> for each rank, its right peer and what that peer is to it.
    """
    size = len(result.ranks)
    for call in (call for call in all_calls(result) if peers and call.point_to_point):
        peer, who = (peers or {})[call.name][call.rank]
        if call.root != peer:
            verb, _, preposition = PAIRS[call.name]
            way = f"{verb} {preposition} rank {call.root} ({call.where})"
            return f"rank {call.rank} of {size} {way}; {who} is rank {peer}"
    waits = [rank.call.name for rank in result.ranks if rank.call]
    stuck = len(waits) == size and set(waits) == {"send"}
    return "every rank waits for its send to complete, but no rank receives: start both, then wait" if stuck else ""


def waits_for_held_back(result: Result) -> str:
    """Say which rank waits, and where, while held_back of tools.py holds another one back; "" if none waits."""
    waiting = [rank.call for rank in result.ranks if rank.call]
    students = [call for call in waiting if not is_of_grader(call)]
    if not students or len(students) == len(waiting):
        return ""
    first = students[0]
    return f"rank {first.rank} waits for {first.name} #{first.number} ({first.where})"


def is_of_grader(call: Call) -> bool:
    """Return whether held_back of tools.py makes this send or recv, and not the student's code."""
    return call.point_to_point and call.tag == tags.GRADER_TAG and call.shape == (1,)
