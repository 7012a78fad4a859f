"""The broker: matches the ranks' calls of collectives, answers them, and notices when no rank can continue.

A collective is the n-th call of each member in its group. It completes when all members have called, if they agree on
root, reduction, shape and dtype; if not, that mismatch is the fault. A send completes with its recv and not before, as
gloo's does. Whenever a rank starts to wait or ends, the broker checks whether any call can still complete. If none can,
that is a deadlock, which needs no time-out.

The broker runs in the grader's process, needs only numpy, and believes nothing about a message but its bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grader.ranks.calls import MEASUREMENT, STORAGE, Call, Event, compute, disagreement, parse_call
from grader.ranks.storages import Storages
from grader.wire.values import TooMuchError

MAX_EVENTS = 20_000  # per rank and run: about 20 MB; a right solution needs a hundredth of them
MAX_EMPTY = 200  # calls without data, which a right solution makes five of: with thousands, ranks could send any number


@dataclass
class Fault:
    """Why a run cannot continue. `stuck`: the call that each rank waited in; `text`: what a mismatch is about."""

    kind: str  # "deadlock" or "mismatch"
    text: str
    stuck: dict[int, Call]


class Broker:
    """Feed it the ranks' messages with `post`, `wait`, `note` and `finish`; take what to answer from `replies`."""

    def __init__(
        self,
        world_size: int,
        keep_payloads: bool = False,
        measure: Callable[[str], None] = lambda point: None,
        storages: Storages | None = None,
    ) -> None:
        """measure: is called when all ranks wait at a point where their memory is measured."""
        self.live = set(range(world_size))
        self.events: list[list[Event]] = [[] for _ in range(world_size)]
        self.completed: list[dict[int, Call]] = []  # every completed collective, rank -> call
        self.replies: list[tuple[int, dict]] = []
        self.fault: Fault | None = None
        self.freed = 0  # bytes of payloads that are no longer kept
        self._keep, self._measure = keep_payloads, measure
        self._storages = storages or Storages()
        self._empty: Counter[int] = Counter()  # calls without data, by rank
        self._posted: Counter[tuple] = Counter()  # calls so far in each sequence, see Call.sequence
        self._collectives: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)  # (group, number) -> rank -> call
        self._pairs: dict[tuple, list[Call]] = defaultdict(list)  # sends and recvs without a partner, by sequence
        self._calls: dict[tuple[int, int], Call] = {}  # by (rank, identity)
        self._waiting: list[dict[int, Call]] = [{} for _ in range(world_size)]  # rank -> thread -> call
        self._threads: list[set[int]] = [{0} for _ in range(world_size)]  # threads that call; 0 is the main one

    def note(self, rank: int, message: dict) -> None:
        """Record an event of a spy."""
        name, where, inside = (message[key][:200] for key in ("name", "where", "inside"))
        self._record(rank, Event(name, where, inside, dict(message["data"])))

    def post(self, rank: int, message: dict) -> None:
        """Take a call that has arrived. Raises MessageError for one that the backend in the rank cannot have sent."""
        call = parse_call(rank, message)
        self._record(rank, call)
        self._empty[rank] += call.is_empty
        if self._empty[rank] > MAX_EMPTY:
            raise TooMuchError(f"made more than {MAX_EMPTY} calls without data, such as barriers")
        call.posted_at = len(self.events[rank])
        self._calls[rank, call.identity] = call
        self._posted[call.sequence] += 1
        call.number = self._posted[call.sequence]
        if self.fault:
            self._refuse(call)
        elif call.name in STORAGE:
            self._complete(call, self._storages.answer(call))
        elif call.point_to_point:
            self._post_pair(call)
        else:
            self._post_collective(call)
        if message["waits"]:
            self.wait(rank, message)

    def wait(self, rank: int, message: dict) -> None:
        """Note that a thread of a rank does nothing more until this call is answered."""
        call = self._calls[rank, message["id"]]
        if call.waited_at is None:
            call.waited_at = len(self.events[rank])
        if call.answered:
            return  # the answer is on its way, or there
        if self.fault:
            return self._refuse(call)
        self._threads[rank] = {0, *message["threads"]}
        self._waiting[rank][message["thread"]] = call
        self._look_for_deadlock()

    def finish(self, rank: int) -> None:
        """Note that a rank makes no more calls: it has returned, raised, exited or died."""
        self.live.discard(rank)
        self._waiting[rank].clear()
        self._look_for_deadlock()

    def stuck_call(self, rank: int) -> Call | None:
        """Return the call that a rank waits in, its main thread first; None if it does not wait."""
        waiting = self._waiting[rank]
        return waiting.get(0) or next(iter(waiting.values()), None)

    def _record(self, rank: int, event: Event) -> None:
        if len(self.events[rank]) >= MAX_EVENTS:
            raise TooMuchError(f"made more than {MAX_EVENTS} calls that the grader records")
        event.arrived = sum(map(len, self.events))
        self.events[rank].append(event)

    def _post_collective(self, call: Call) -> None:
        """Complete a collective once all members have called it, or find out why it never can."""
        calls = self._collectives[call.group, call.number]
        calls[call.rank] = call
        if len(calls) < len(call.members):
            return
        del self._collectives[call.group, call.number]
        ordered = [calls[member] for member in call.members]
        if len({part.name for part in ordered}) > 1:
            self._fail("deadlock", "")  # each waits for the others to call its own operation
        elif text := disagreement(ordered):
            self._fail("mismatch", text)
        else:
            if call.name == MEASUREMENT and call.data["point"]:
                self._measure(call.data["point"])
            self.completed.append(calls)
            for part, payload in zip(ordered, compute(ordered), strict=True):
                self._complete(part, payload)

    def _post_pair(self, call: Call) -> None:
        """Complete a send and its recv once both are here."""
        partners = self._pairs[call.partner_sequence]
        if not partners:
            self._pairs[call.sequence].append(call)
            return
        send, recv = sorted((call, partners.pop(0)), key=lambda part: part.name == "recv")
        if text := disagreement([send, recv]):
            return self._fail("mismatch", text)
        payload = send.payload or b""
        self._complete(send, b"")
        self._complete(recv, payload)

    def _complete(self, call: Call, payload: bytes) -> None:
        call.complete, call.received = True, len(payload)
        if not self._keep:
            self.freed += len(call.payload or b"")
            call.payload = None
        self._answer(call, {"payload": np.frombuffer(payload, np.uint8)})

    def _refuse(self, call: Call) -> None:
        assert self.fault is not None
        self.fault.stuck.setdefault(call.rank, call)
        self._answer(call, {"error": f"{self.fault.kind}: {self.fault.text or 'no rank can continue'}"})

    def _answer(self, call: Call, content: dict) -> None:
        call.answered = True
        for thread, waiting in list(self._waiting[call.rank].items()):
            if waiting is call:
                del self._waiting[call.rank][thread]
        self.replies.append((call.rank, {"id": call.identity} | content))

    def _look_for_deadlock(self) -> None:
        if self.fault or not self.live:
            return
        waiting = [call for rank in self.live for call in self._waiting[rank].values()]
        blocked = all(self._waiting[rank].keys() == self._threads[rank] for rank in self.live)
        if blocked or any(self._can_never_complete(call) for call in waiting):
            self._fail("deadlock", "")

    def _can_never_complete(self, call: Call) -> bool:
        """Return whether a call needs a rank that has ended without its own part in it."""
        if call.point_to_point:
            return call.root not in self.live
        return any(
            member not in self.live and self._posted[call.group, member] < call.number for member in call.members
        )

    def _fail(self, kind: str, text: str) -> None:
        """Answer every waiting rank with an error; the other ranks get the error at their next call."""
        self.fault = Fault(kind, text, {})
        self.fault.stuck |= {rank: call for rank in self.live if (call := self.stuck_call(rank))}
        for call in [call for threads in self._waiting for call in threads.values()]:
            self._refuse(call)
