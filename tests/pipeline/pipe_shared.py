"""Shared by the tests of a Pipe, p.3 to p.5: who waits for whom, and evidence that partitions work at the same time.

    rank, worker of partition j    ── request: the place, the partition's input and its result ──>    referee
                                   <── reply: a permit, once all places of the group have asked ──

A place is (call, micro-batch, partition). A partition's result is multiplied by its permit, a number that is drawn for
this place and that no rank has. So a Pipe has the right values only if all partitions of a clock cycle ask at the same
time, each with its own input and result. The rank itself reports which thread asks: this explains honest mistakes, and
is no evidence. Evidence of threads is in grader/ranks/thread_times.py, for p.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grader.grading import Grade
from grader.in_rank import InRank, run_to_any_end
from grader.ranks.outcome import Result
from grader.ranks.referee import Replies
from grader.ranks.thread_times import ThreadTimes
from grader.verdicts import Deadlocked, TimedOut
from grader.wire.values import Fields, MessageError

IN_RANK = "tests/pipeline/pipe_in_rank.py"
PATIENCE = 8.0  # seconds after which partitions stop waiting for each other, if no count shows it earlier
DEADLINE = 20.0  # seconds for a run, which takes well under one
CONTENT = 12  # first numbers of a partition's input, and of its result, that a request has; also in IN_RANK
MAIN = 0  # the thread that calls the pipe
NO_PERMIT = 1.0  # changes nothing
CRASHES = {  # torch's and Python's words -> what they mean here
    "stack expects each tensor to be equal size": "the last micro-batch may be smaller: put the results together along "
    "the examples, with torch.cat",
    "object has no attribute 'compute'": "an in-queue takes only Tasks: make a Task of the function",
    "must be integers or slices, not tuple ... pipeline/pipe.py": "compute was given the whole schedule: it computes "
    "one clock cycle, a list of (micro-batch, partition) pairs",
    "cannot unpack non-iterable int object ... pipeline/pipe.py": "compute gets the pairs of one clock cycle, not the "
    "whole schedule: loop over the pairs only",
    "out of bounds for dimension ... pipeline/pipe.py": "batches is a list of micro-batches, one tensor each: "
    "batches[i] is micro-batch i, in whichever partition it is",
    "values to unpack ... pipeline/pipe.py": "compute was given something other than the pairs of one clock cycle, a "
    "list of (micro-batch, partition)",
}
Pairs = Sequence[Sequence[int]]  # (micro-batch, partition)
Place = tuple[int, int, int]  # call, micro-batch, partition


def split_sizes(batch: int, split_size: int) -> list[int]:
    """Return the sizes of the micro-batches."""
    return [min(split_size, batch - start) for start in range(0, batch, split_size)]


def run_pipe(grade: Grade, function: InRank, inputs: Sequence[Any], **arguments: Any) -> Result:
    """Run a student's Pipe. After a run that never returned, make no other: each would take as long again."""
    for key, earlier in grade.session.runs.items():
        if earlier.outcome == "deadline" and IN_RANK in key:
            raise TimedOut(grade.with_seed(f"an earlier run of the pipe never returned: {earlier.explain()}"))
    patience = PATIENCE * grade.session.slowness
    return run_to_any_end(grade, function, inputs, deadline=DEADLINE, patience=patience, **arguments)


# --- who waits for whom ---


class Watched:
    """Events of a rank: put and get of the caller, enter of the partitions."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events
        self.enters = self.named("enter")
        self.places = [(int(first), int(j)) for first, j in (enter["place"] for enter in self.enters)]
        self.in_caller = any(enter["in_caller"] for enter in self.enters)

    def named(self, name: str) -> list[Fields]:
        return [event.data for event in self.events if event.name == name]

    def late_binding(self, pairs: Pairs) -> str:
        """Return the hint if two tasks of one cycle took the same micro-batch or the same partition, else ""."""
        micro_batches, partitions = len({i for i, _ in self.places}), len({j for _, j in self.places})
        if len(self.places) < len(pairs) or min(micro_batches, partitions) >= len(pairs):
            return ""
        twice = "micro-batch" if micro_batches < len(pairs) else "partition"
        words = "a lambda created in a loop reads the loop variables when it runs; bind them when you create it"
        return f"Two tasks took the same {twice}: {words}"

    def hang(self, pairs: Pairs, split_size: int) -> str:
        """Say who waits for whom. The number of its first example tells which micro-batch it is."""
        puts, gets = (Counter(data["partition"] for data in self.named(name)) for name in ("put", "get"))
        entered = {(first // split_size, j) for first, j in self.places}
        waiting = [(i, j) for i, j in sorted(map(tuple, pairs)) if (i, j) not in entered]
        in_vain = next((j for j in sorted(gets) if gets[j] > puts[j]), None)
        never = next((f"partition {j} never got micro-batch {i}" for i, j in waiting if in_vain in (j, None)), "")
        if in_vain is None:
            return never or "every partition has run, but the call does not return"
        what = f"{gets[in_vain]} results" if puts[in_vain] else "a result"
        asks = f"{never}{': ' if never else ''}your code asks for {what} from out_queues[{in_vain}]"
        if not puts:
            return f"{asks} before it has put any task: put first, then get"
        if not puts[in_vain]:
            return f"{asks}, but no task went into in_queues[{in_vain}]: ask for each result where its task was put"
        return f"{asks}, but put only {puts[in_vain]} tasks into in_queues[{in_vain}]"


def must_end(grade: Grade, result: Result, pairs: Pairs, split_size: int = 1) -> None:
    """Raise the verdict if the call did not return; say of a hang who waits for what."""
    hang = Watched(result.ranks[0].events).hang(pairs, split_size)
    if result.outcome == "deadline":
        raise TimedOut(grade.with_seed(f"{hang}; {result.explain()}"))
    grade.must_return(result)
    if isinstance(result.values[0], dict) and result.values[0].get("waits_forever"):
        raise Deadlocked(grade.with_seed(hang))


def must_meet(grade: Grade, result: Result, why: Callable[[Watched, int], str]) -> None:
    """Fail if a partition waited in vain for the others of its group.

    `why(watched, micro_batch)` gives the reason; `watched` has the events of this call of compute up to that moment.
    """
    events = result.ranks[0].events
    number = next((number for number, event in enumerate(events) if event.name == "alone"), None)
    if number is None:
        return
    i, j = events[number].data["place"]
    if Watched(events).in_caller:
        grade.fail(
            f"partition {j} runs in the caller's thread: put a Task into in_queues[j] whose function calls it, and do "
            "not call it when you make the Task"
        )
    start = max((before for before in range(number) if events[before].name == "cycle"), default=-1)
    absent = ", ".join(f"micro-batch {m} in partition {n}" for m, n in events[number].data["missing"])
    grade.fail(
        f"while partition {j} worked on micro-batch {i}, {absent} should have run at the same time, but did not: "
        f"{why(Watched(events[start + 1 : number]), i)}"
    )


# --- permits ---


def draw_permits(draw: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Draw a permit for every place: (calls, micro-batches, partitions)."""
    return draw.uniform(0.5, 2.0, size=shape)


@dataclass
class PermitReferee:
    """Replies with the permits of a group, once all its places have asked. A place without a group is its own group.

    `arrivals`: place -> the first numbers of its input; `made`: place -> those of its result before the permit;
    `faults`: what is wrong with other requests. With `threads`, the places take turns: each gets a token, and pays for
    its permit with CPU time.
    """

    permits: np.ndarray
    groups: Sequence[Pairs]
    threads: ThreadTimes | None = None
    arrivals: dict[Place, np.ndarray] = field(default_factory=dict)
    made: dict[Place, np.ndarray] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _begun: dict[Place, int] = field(default_factory=dict)  # place -> number of its request for a turn
    _waiting: dict[Place, tuple[int, int]] = field(default_factory=dict)  # place -> thread, number of its request
    _partition_of: dict[int, int] = field(default_factory=dict)  # thread -> partition
    _worker_of: dict[int, int] = field(default_factory=dict)  # partition -> thread

    def started(self, pids: Sequence[int]) -> None:
        if self.threads:
            self.threads.pid = pids[0]

    def ask(self, message: dict) -> Replies:
        """Reply to a request of the rank: Permits in pipe_in_rank.py sends them."""
        thread, number = int(message["thread"]), int(message["id"])
        call, i, j = (int(part) for part in message["place"])
        place = call, i, j
        if message["what"] == "begin":
            return self._begin(place, number)
        if any(thread == waiting for waiting, _ in self._waiting.values()):
            raise MessageError("a thread asks for a permit while it waits for another one")
        if not all(0 <= part < count for part, count in zip(place, self.permits.shape, strict=True)):
            return [(number, NO_PERMIT)]
        if fault := self._fault(place, thread):
            self.faults.append(fault)
            return [(number, NO_PERMIT), *self._next_turn()]
        self.arrivals[place], self.made[place] = (
            np.ravel(np.asarray(message[key], np.float64))[:CONTENT] for key in ("content", "made")
        )
        self._waiting[place] = thread, number
        if self.threads:
            self.threads.end(f"partition {j}", f"micro-batch {i}", self.arrivals[place], message["digest"])
        turn, group = self._next_turn(), self._group(place)
        if not self._waiting.keys() >= set(group):
            return turn
        return turn + [(self._waiting.pop(other)[1], float(self.permits[other])) for other in group]

    def _group(self, place: Place) -> list[Place]:
        call, *pair = place
        return next(([(call, i, j) for i, j in group] for group in self.groups if pair in group), [place])

    def _begin(self, place: Place, number: int) -> Replies:
        """Begin the turns of a group, one after the other, once all its places have asked for one."""
        if not self.threads:
            return [(number, "")]
        self._begun[place] = number
        return self._next_turn() if self._begun.keys() >= set(self._group(place)) else []

    def _next_turn(self) -> Replies:
        if not self.threads or not self._begun:
            return []
        return [(self._begun.pop(next(iter(self._begun))), self.threads.begin())]

    def _fault(self, place: Place, thread: int) -> str:
        """Say why this thread may not ask for this place, "" if it may: a partition has one worker of its own."""
        _, i, j = place
        if thread == MAIN:
            return f"partition {j} runs in the caller's thread"
        if place in self._waiting:
            return f"partition {j} runs twice on micro-batch {i} at the same time"
        if (other := self._partition_of.setdefault(thread, j)) != j:
            return f"partitions {other} and {j} run in one thread: each needs its own worker"
        if self._worker_of.setdefault(j, thread) != thread:
            return f"partition {j} runs in several threads: it has one worker, behind in_queues[{j}]"
        return ""


def must_have_permits(grade: Grade, result: Result, right: Mapping[Place, tuple[np.ndarray, np.ndarray]]) -> None:
    """Fail unless every place has asked, with its right input and its right result before the permit."""
    referee: PermitReferee = result.referee
    for fault in referee.faults:
        grade.fail(fault)
    if referee.threads and referee.threads.problem:
        grade.fail(referee.threads.problem)
    together = "while the partitions of its clock cycle ran at the same time"
    for place, (x, made) in right.items():
        got, (_, i, j) = referee.arrivals.get(place), place
        if not begins_as(got, x):
            verb = "did not get" if got is None else "got wrong values for"
            advice = "each partition must take the previous partition's result, in its own worker"
            grade.fail(f"partition {j} {verb} micro-batch {i} {together}: {advice}")
        if not begins_as(referee.made.get(place), made):
            advice = "the worker must call the partition itself"
            grade.fail(f"partition {j} did not compute micro-batch {i} {together}: {advice}")


def begins_as(got: np.ndarray | None, right: np.ndarray) -> bool:
    """Return whether `got` are the first numbers of `right`; attention kernels differ by 1e-6 to 1e-5."""
    begin = np.ravel(right)[:CONTENT]
    close = 1e-4 * float(np.abs(begin).max(initial=1e-6))
    return got is not None and got.shape == begin.shape and bool(np.allclose(got, begin, rtol=1e-4, atol=close))
