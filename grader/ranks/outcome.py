"""The result of a run: how each rank ended and with which value, and one line that says why.

A rank that did not return has no value here, so a dead or stuck rank cannot pass for a right one.
"""

import signal
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grader.ranks.broker import Fault
from grader.ranks.calls import Call, Event
from grader.ranks.phrases import Phrase, sentence

DEBUGGER = "BdbQuit"  # the type of a failure: a debugger was called, which has no terminal in a rank
ENDLESS = "EndlessLoop"  # the type of a failure that is no exception: a rank that has sent too much
CAUSES = ("raised", "killed", "exited")  # the ends of a rank that can stop the others


class Frame(NamedTuple):
    """One line of a traceback; `file` is relative to the student's tree."""

    file: str
    line: int
    function: str
    text: str


@dataclass
class Failure:
    """An exception that left the function in a rank. `during` says what it was doing: "loading lesson.py"."""

    type: str
    message: str
    during: str = ""
    trace: list[Frame] = field(default_factory=list)
    code: int | None = None  # exit code, of a SystemExit
    last_call: str = ""  # file:line, where there is no trace

    @property
    def where(self) -> str:
        return f"{self.trace[-1].file}:{self.trace[-1].line}" if self.trace else self.last_call

    def __str__(self) -> str:
        text = " ".join(self.message.split())
        if self.type == "MemoryError" and not text:
            text = "more than 1 GB was used: does a loop in your code never end?"
        return f"{self.type}: {text[:300]}" + (f" while {self.during}" if self.during else "")


@dataclass
class RankResult:
    """How one rank ended, what it printed, and everything it did that a spy or the broker noted.

    `outcome` is returned, raised, exited, killed (by a signal), stuck (in `call`, which can never complete), deadline
    (still running or waiting when the time was up) or stopped (still running when the others had failed).
    """

    rank: int
    outcome: str
    value: Any = None  # only of a rank that returned
    error: Failure | None = None  # of one that raised, or exited by SystemExit
    code: int = 0  # exit code, or the number of the signal
    call: Call | None = None  # the call it waits in, if it is stuck or met the deadline there
    where: str = ""  # file:line in the student's tree where it ended, waits or still ran
    stdout: str = ""
    stderr: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        """Return the rank's collectives, sends and recvs, in order."""
        return [event for event in self.events if isinstance(event, Call)]

    def phrase(self) -> Phrase:
        """Say to the student how the rank ended: `rank 1 raised ValueError: ... (lesson.py:12)`."""
        verb, rest = "was", "still running"
        if self.call:
            peer = {"send": f" to rank {self.call.root}", "recv": f" from rank {self.call.root}"}.get(
                self.call.name, ""
            )
            verb, rest = "waits", f"in {self.call.name} #{self.call.number}{peer}{self.call.in_group}"
        elif self.outcome == "returned":
            verb, rest = "has", "already returned"
        elif self.error and self.error.type == ENDLESS:
            verb, _, rest = self.error.message.partition(" ")
        elif self.outcome == "raised":
            verb, rest = "raised", str(self.error)
        elif self.outcome == "killed":
            known = self.code in list(signal.Signals)
            verb, rest = "was", f"killed by {signal.Signals(self.code).name if known else f'signal {self.code}'}"
        elif self.outcome == "exited":
            verb, rest = "exited", f"with code {self.code}" + (f" by {self.error}" if self.error else "")
        return Phrase(self.rank, verb, rest, self.where)


@dataclass
class Result:
    """One run: a RankResult per rank, the fault if there was one, and every completed collective as rank -> Call."""

    ranks: list[RankResult]
    fault: Fault | None
    collectives: list[dict[int, Call]]
    deadline: float
    size: int = 0  # bytes of memory that its values and events take, about
    memory: dict[str, list[int]] = field(default_factory=dict)  # point of a measurement -> bytes that each rank has
    storages: list[dict[str, bytes]] = field(default_factory=list)  # what the ranks have left in each

    @property
    def outcome(self) -> str:
        """Return the cause, not its effects: returned, raised, killed, exited, mismatch, deadlock or deadline."""
        outcomes = {rank.outcome for rank in self.ranks}
        for cause in CAUSES:
            if cause in outcomes:
                return cause
        if self.fault:
            return self.fault.kind
        return "deadline" if "deadline" in outcomes else "returned"

    @property
    def took_too_long(self) -> bool:
        """Return whether a rank was still running when the time was up, or would have run for ever."""
        return self.outcome == "deadline" or any(rank.error and rank.error.type == ENDLESS for rank in self.ranks)

    @property
    def values(self) -> list[Any]:
        """Return what the function returned on each rank. Raises RuntimeError unless every rank returned."""
        if self.outcome != "returned":
            raise RuntimeError(self.explain())
        return [rank.value for rank in self.ranks]

    def explain(self) -> str:
        """Say in one line what happened, the cause first, and that it is a deadlock; "" if every rank returned."""
        return f"deadlock: {self.story()}" if self.outcome == "deadlock" else self.story()

    def story(self) -> str:
        """Say in one line what each rank did in the end, the cause first; "" if every rank returned."""
        outcome = self.outcome
        if outcome == "returned":
            return ""
        if outcome == "mismatch" and self.fault:
            return f"the ranks do not agree: {self.fault.text}"
        named = [rank for cause in CAUSES for rank in self.ranks if rank.outcome == cause]
        named += [rank for rank in self.ranks if rank.outcome in ("stuck", "deadline", "stopped")]
        named += [rank for rank in self.ranks if rank.outcome == "returned" and self.fault]
        text = sentence(rank.phrase() for rank in named)
        if outcome == "deadline":
            computes = any(rank.where and not rank.call for rank in named)
            question = ": does a loop there never end?" if computes and not any(rank.call for rank in named) else ""
            return f"the deadline of {self.deadline:g} s has passed: {text}{question}"
        return text
