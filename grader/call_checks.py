"""Judges which collectives a rank makes, and what it passes to them. All of it is what the broker has seen."""

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
    """Return what a rank did, cut at the events that the function in the rank has noted."""
    found: list[Phase] = []
    for event in result.ranks[rank].events:
        if not isinstance(event, Call):
            found.append(Phase(event, []))
        elif event.name not in JOINING and found:
            found[-1].calls.append(event)
    return found


def all_calls(result: Result) -> list[Call]:
    return [call for rank in result.ranks for call in rank.calls]


def names_used(calls: Iterable[Call]) -> set[str]:
    """Return the collectives that were called, without joining and barriers."""
    return {call.name for call in calls} - JOINING


def in_words(names: Iterable[str]) -> str:
    return " and ".join(sorted(names)) or "no collective at all"


def must_use(grade: Grade, result: Result, names: set[str]) -> None:
    """Fail if ranks exchange anything with other collectives than these; one rank alone need not call any."""
    used = names_used(all_calls(result))
    if len(result.ranks) > 1 and used != names:
        grade.fail(f"expected {in_words(names)} and nothing else, got {in_words(used)}")


def must_be_own_calls(grade: Grade, result: Result, instead: str) -> None:
    """Fail if a function of a library makes a call: what it computes is not the student's work."""
    for call in all_calls(result):
        if call.inside and call.name not in JOINING and not is_of_grader(call):
            place = f" ({call.where})" if call.where else ""
            grade.fail(f"{call.name} is called inside {call.inside}{place}, not by your own line: {instead}")


class Sent(NamedTuple):
    """What a rank must pass to all its calls of one collective.

    bytes: their number, at most 2 % more; numbers: what they are, in any order and cut and times one factor, None where
    only bytes count; root: of every call.
    """

    bytes: int
    numbers: Sequence[np.ndarray] | None = None
    root: int | None = None


def check_sent(grade: Grade, rank: int, calls: Sequence[Call], expected: Mapping[str, Sent], what: str) -> None:
    """Fail unless a rank uses these collectives alone, and passes to each what is expected once. `what` names that."""
    if names_used(calls) - set(expected):
        grade.fail(f"expected {in_words(expected)} and nothing else, got {in_words(names_used(calls))}")
    for name, sent in expected.items():
        ours = [call for call in calls if call.name == name]
        if sent.root is not None and (roots := {call.root for call in ours} - {sent.root}):
            grade.fail(
                f"expected rank {sent.root} to be the root of every {name}, got the roots {sorted(map(str, roots))}"
            )
        size = sum(call.sent for call in ours)
        if not sent.bytes <= size <= 1.02 * sent.bytes:
            relation = f"{size / sent.bytes:.2f} times the expected {sent.bytes}" if sent.bytes else "expected 0"
            grade.fail(f"rank {rank} passes {size} bytes to {name}, {relation}: send {what} once")
        if sent.numbers is not None and not same_numbers([call.sent_arrays() for call in ours], sent.numbers):
            grade.fail(f"what rank {rank} passes to {name} is not {what}")


class Payloads:
    """All numbers that each rank has passed to collectives, to ask whether a tensor was among them."""

    def __init__(self, result: Result) -> None:
        self.ranks = len(result.ranks)
        sending = [[call for call in rank.calls if call.payload and call.name != "broadcast"] for rank in result.ranks]
        self.numbers = [flat([call.sent_arrays() for call in calls]) for calls in sending]

    def include(self, rank: int, tensor: np.ndarray) -> bool:
        """Return whether a rank has sent this tensor, as it is or divided by the number of ranks."""
        numbers = np.ravel(tensor).astype(np.float64)
        largest = numbers[np.argsort(-np.abs(numbers))[:4]]  # one number alone is near another tensor's with some draws
        return any(
            all(np.isclose(self.numbers[rank], number / divisor, rtol=1e-5, atol=0).any() for number in largest)
            for divisor in (1, self.ranks)
        )


# --- messages, one by one ---


class ExpectedCall(NamedTuple):
    """One call that a rank must make: a send, a recv, or a collective.

    peer: of a send or recv, with what that rank is to this one; payload: the numbers, with what they are; mistakes:
    sentence -> the numbers that a mistake sends instead; members: the group of a collective; elements: how many
    numbers, where their values do not matter.
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
        ours = [call for call in calls if call.name == name]
        theirs = [message for message in expected if message.name == name]
        for call in ours:
            _check_ends(grade, where, rank, call, theirs[0], advice)
        if len(ours) != len(theirs):
            grade.fail(f"{where}: rank {rank} {PAIRS[name][0]} {len(ours)} messages, expected {len(theirs)}: {advice}")
        for number, (call, message) in enumerate(zip(ours, theirs, strict=True)):
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
        grade.fail(f"{where}, {call.name} ({call.where}): expected a sum, got {call.reduce}")


def _check_payload(grade: Grade, where: str, call: Call, message: ExpectedCall, round_: str) -> None:
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
        cause = next((f"{cause}\n" for cause in causes), "")
        grade.fail(f"{cause}{where} {verb} {what}{round_} ({call.where}); expected {of}")


def why_stuck(result: Result, peers: Mapping[str, Sequence[tuple[int, str]]] | None = None) -> str:
    """Say why ranks that exchange messages wait for each other; "" where it is no known mistake.

    `peers`: the right peer of every send and recv of each rank, and what that is to it.
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
    """Say which rank waits, and where, while another one is held back; "" if none does. See held_back in tools.py."""
    waiting = [rank.call for rank in result.ranks if rank.call]
    theirs = [call for call in waiting if not is_of_grader(call)]
    if not theirs or len(theirs) == len(waiting):
        return ""
    return f"rank {theirs[0].rank} waits for {theirs[0].name} #{theirs[0].number} ({theirs[0].where})"


def is_of_grader(call: Call) -> bool:
    """Return whether a send or recv is held_back's, and not the student's."""
    return call.point_to_point and call.tag == tags.OURS and call.shape == (1,)
