"""Shared by the tests of a Pipe, p.3 to p.5: who waits for whom, and whether partitions work at the same time.

The stages and queues of pipe_in_rank.py report it. A stage of a group ends only when all stages of its group have
begun, so partitions that run one after another are found whatever their speed is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grader.grading import Grade
from grader.in_rank import run_to_any_end
from grader.ranks.calls import Event
from grader.ranks.outcome import Result
from grader.verdicts import Deadlocked, TimedOut
from grader.wire.request import RankFunction
from grader.wire.values import Fields
from tests.pipeline.test_schedule import right_cycles

IN_RANK = "tests/pipeline/pipe_in_rank.py"
PATIENCE = 8.0  # seconds after which partitions stop waiting for each other, if no count shows it earlier
DEADLINE = 20.0  # seconds for a run, which takes well under one
CRASHES = {  # torch's and Python's words -> what they mean here
    "raised Empty ... get(": "a result may take long: wait for it without a time limit, out_queues[j].get()",
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


def split_sizes(batch: int, split_size: int) -> list[int]:
    """Return the sizes of the micro-batches."""
    return [min(split_size, batch - start) for start in range(0, batch, split_size)]


def run_pipe(
    grade: Grade,
    function: RankFunction,
    inputs: Sequence[object],
    sizes: Sequence[tuple[int, int]] = (),
    **arguments: Any,
) -> Result:
    """Run a student's Pipe. After a run that never returned, make no other: each would take as long again.

    For `sizes` (micro-batches, partitions) the schedule is given, so that a mistake in p.2 costs only points of p.2.
    """
    for key, earlier in grade.session.runs.items():
        if earlier.outcome == "deadline" and IN_RANK in key:
            raise TimedOut(observed=f"an earlier run of the pipe never returned: {earlier.explain()}", seed=grade.seed)
    patience = PATIENCE * grade.session.slowness
    given = [[m, n, right_cycles(m, n)] for m, n in sizes]
    return run_to_any_end(grade, function, inputs, deadline=DEADLINE, patience=patience, given=given, **arguments)


# --- who waits for whom ---


class Watched:
    """Events of a rank: put and get of the caller, enter of the partitions."""

    def __init__(self, events: Sequence[Event]) -> None:
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
        raise TimedOut(hang, result.explain(), seed=grade.seed)
    grade.must_return(result)
    if isinstance(result.values[0], dict) and result.values[0].get("waits_forever"):
        raise Deadlocked(hang, seed=grade.seed)


def must_meet(grade: Grade, result: Result, why: Callable[[Watched, int], str]) -> None:
    """Fail if a partition waited in vain for the others of its group, or worked in the caller's thread.

    `why(watched, micro_batch)` gives the reason; `watched` has the events of this call of compute up to that moment.
    """
    events = result.ranks[0].events
    if Watched(events).in_caller:
        grade.fail(
            "a partition runs in the caller's thread: put a Task into in_queues[j] whose function calls it, and do not "
            "call it when you make the Task"
        )
    number = next((number for number, event in enumerate(events) if event.name == "alone"), None)
    if number is None:
        return
    i, j = events[number].data["place"]
    start = max((before for before in range(number) if events[before].name == "cycle"), default=-1)
    absent = ", ".join(f"micro-batch {m} in partition {n}" for m, n in events[number].data["missing"])
    grade.fail(
        f"while partition {j} worked on micro-batch {i}, {absent} should have run at the same time, but did not: "
        f"{why(Watched(events[start + 1 : number]), i)}"
    )


def must_have_met(grade: Grade, result: Result, groups: Sequence[Pairs]) -> None:
    """Fail unless all places of each group had begun before one of them had ended."""
    first: dict[tuple[str, int, int], int] = {}
    for number, event in enumerate(result.ranks[0].events):
        if event.name in ("present", "left"):
            first.setdefault((event.name, *event.data["place"]), number)
    for group in groups:
        begun = max(first.get(("present", i, j), math.inf) for i, j in group)
        if begun > min(first.get(("left", i, j), 0) for i, j in group):
            grade.fail(
                observed=f"the (micro-batch, partition) pairs {[*map(tuple, group)]} should run at the same time"
            )
