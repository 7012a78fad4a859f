"""Says who waits for whom in a pipe that hangs, or whose partitions never work at the same time."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.ranks.referee import CONTENT, PermitReferee
from grader.verdicts import Deadlocked, TimedOut

SAME = 1e-4  # of an input: another kernel for attention rounds differently by 1e-6 to 1e-5
PATIENCE = 8.0  # seconds after which partitions that wait for each other give up where no count shows it before
DEADLINE = 20.0  # seconds for a run, which takes well under one
PIPES = "grader.probes.pipeline."  # the probes that run a student's Pipe

Pairs = Sequence[Sequence[int]]


def run_once(grade: Grade, probe: str, world_size: int = 1, **arguments: object) -> Result:
    """A run of a student's Pipe. After one that never returned no other is made: each would take as long again."""
    for key, earlier in grade.session.runs.items():
        if earlier.outcome == "deadline" and key.startswith(f"[{PIPES!r}"[:-1]):
            raise TimedOut(grade.with_seed(f"an earlier run of the pipe never returned: {earlier.explain()}"))
    return grade.run(probe, world_size, DEADLINE, **arguments)


def mark(each: object) -> str:
    """Of what the ranks start with: runs are remembered by their arguments, and `each` is none of those."""
    arrays = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    own = "".join(map(mark, arrays)) if arrays else repr(np.asarray(each).tolist())
    return hashlib.sha256(own.encode()).hexdigest()


def must_end(grade: Grade, result: Result, pairs: Pairs, split_size: int = 1) -> None:
    """The verdict if the call did not return; a hang is described by who waits for what."""
    if result.outcome == "deadline":
        raise TimedOut(grade.with_seed(f"{hang(result, pairs, split_size)}; {result.explain()}"))
    grade.must_return(result)
    if isinstance(result.values[0], dict) and result.values[0].get("waits_forever"):
        raise Deadlocked(grade.with_seed(hang(result, pairs, split_size)))


def hang(result: Result, pairs: Pairs, split_size: int) -> str:
    """Who waits for whom, from what was put, asked for and entered. A micro-batch is known by its first example."""
    events = result.ranks[0].events
    puts, gets = (Counter(e.data["partition"] for e in events if e.name == name) for name in ("put", "get"))
    places = [event.data["place"] for event in events if event.name == "enter"]
    entered = {(first // split_size, j) for first, j in places}
    if short := sorted(j for j in gets if gets[j] > puts[j]):
        j = short[0]
        micro_batches = [i for i, partition in pairs if partition == j]
        missing = [i for i in micro_batches if (i, j) not in entered]
        never = f"partition {j} never got micro-batch {missing[0]}: " if missing else ""
        return f"{never}{_asked_in_vain(j, puts, gets)}"
    if waiting := [(i, j) for i, j in sorted(map(tuple, pairs)) if (i, j) not in entered]:
        i, j = waiting[0]
        return f"partition {j} never got micro-batch {i}"
    return "every partition has run, but the call does not return"


def _asked_in_vain(j: int, puts: Counter, gets: Counter) -> str:
    if not puts:
        return f"your code asks for a result from out_queues[{j}] before it has put any task: put first, then get"
    if not puts[j]:
        return f"your code asks for a result from out_queues[{j}], but no task went into in_queues[{j}]"
    return (
        f"your code asks for {gets[j]} results from out_queues[{j}], but put only {puts[j]} tasks into in_queues[{j}]"
    )


class Alone:
    """The first stage that waited for others in vain, and what the caller had done by then.

    `before` are the events of the same call of compute that came before it.
    """

    def __init__(self, events: list[Any], number: int) -> None:
        self.micro_batch, self.partition = events[number].data["place"]
        self.missing = [tuple(place) for place in events[number].data["missing"]]
        start = max((k for k in range(number) if events[k].name == "cycle"), default=-1)
        self.before = events[start + 1 : number]
        self.in_caller = any(event.name == "enter" and event.data["in_caller"] for event in events)
        self.puts = [event.data["partition"] for event in self.before if event.name == "put"]
        names = [event.name for event in self.before if event.name in ("put", "get")]
        self.puts_before_get = names.index("get") if "get" in names else len(names)
        self.places = [tuple(event.data["place"]) for event in self.before if event.name == "enter"]
        self.largest = max((len(event.data["marks"]) for event in self.before if event.name == "enter"), default=0)


def must_meet(grade: Grade, result: Result, cause: Any) -> None:
    """Wrong if a stage waited in vain; `cause` gives the reason for an Alone."""
    events = result.ranks[0].events
    number = next((k for k, event in enumerate(events) if event.name == "alone"), None)
    if number is None:
        return
    alone = Alone(events, number)
    if alone.in_caller:
        grade.fail(f"partition {alone.partition} runs in the caller's thread: put its Task into in_queues[j]")
    absent = ", ".join(f"micro-batch {i} in partition {j}" for i, j in alone.missing)
    grade.fail(
        f"while partition {alone.partition} worked on micro-batch {alone.micro_batch}, {absent} should have run at the "
        f"same time, but did not: {cause(alone)}"
    )


def draw_permits(draw: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """(calls, micro-batches, partitions): what the referee multiplies results by."""
    return draw.uniform(0.5, 2.0, size=shape)


Arrays = dict[tuple[int, int, int], np.ndarray]  # by place: call, micro-batch, partition


def must_have_permits(grade: Grade, result: Result, inputs: Arrays, results: Arrays) -> None:
    """Wrong unless the referee had every place, in its worker, with its own input and with its result without permit.

    It hands out permits, which the values hold, when all of a group wait for theirs.
    """
    referee: PermitReferee = result.referee
    for fault in referee.faults:
        grade.fail(fault)
    if referee.threads and referee.threads.problem:
        grade.fail(referee.threads.problem)
    for place, x in inputs.items():
        got, (_, i, j) = referee.arrivals.get(place), place
        if not _begins_as(got, x):
            seen = "did not get" if got is None else "got wrong values for"
            grade.fail(
                f"partition {j} {seen} micro-batch {i} while the partitions of its clock cycle ran at the same time: "
                "each partition must take the previous partition's result, in its own worker"
            )
        if not _begins_as(referee.made.get(place), results[place]):
            grade.fail(
                f"partition {j} did not compute micro-batch {i} while the partitions of its clock cycle ran at the "
                "same time: the worker must call the partition itself"
            )


def _begins_as(got: np.ndarray | None, right: np.ndarray) -> bool:
    begin = np.ravel(right)[:CONTENT]
    close = SAME * float(np.abs(begin).max(initial=1e-6))
    return got is not None and got.shape == begin.shape and bool(np.allclose(got, begin, rtol=SAME, atol=close))


def must_be_in_a_pipe(grade: Grade, events: list[Any]) -> None:
    """Every block works while a Pipe is called that Pipe(...) has built."""
    in_pipe = False
    for event in events:
        if event.name == "pipe":
            in_pipe = event.data["begins"] and event.data["built"]
        elif event.name == "block" and not in_pipe:
            grade.fail("a block runs outside the Pipe: forward must call self.h_pp, a Pipe(...) of the blocks")


def late_binding(places: Sequence[Any], pairs: Pairs) -> str:
    """The hint where two tasks of one cycle took the same micro-batch or the same partition, else ""."""
    micro_batches, partitions = (sorted({place[k] for place in places}) for k in (0, 1))
    if len(places) < len(pairs) or min(len(micro_batches), len(partitions)) >= len(pairs):
        return ""
    twice = "micro-batch" if len(micro_batches) < len(pairs) else "partition"
    return (
        f"two tasks took the same {twice}: a lambda created in a loop reads the loop variables when it runs; bind them "
        "when you create it"
    )
