"""Says who waits for whom in a pipe that hangs, or whose partitions never work at the same time."""

from collections import Counter
from collections.abc import Sequence

from grader.grading import Grade
from grader.outcome import Result
from grader.verdicts import TimedOut

PATIENCE = 8.0  # seconds after which partitions that wait for each other give up where nothing shows it before
DEADLINE = 20.0  # seconds for a run, which takes well under one


def must_end(grade: Grade, result: Result, pairs: Sequence[Sequence[int]], split_size: int = 1) -> None:
    """The verdict if the run did not return; a hang is told by who waits for what."""
    if result.outcome == "deadline":
        raise TimedOut(grade.with_seed(f"{hang(result, pairs, split_size)}; {result.explain()}"))
    grade.must_return(result)


def hang(result: Result, pairs: Sequence[Sequence[int]], split_size: int) -> str:
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
    return "every partition has worked, and the call does not come back"


def _asked_in_vain(j: int, puts: Counter, gets: Counter) -> str:
    if not puts:
        return f"a result was asked for from out_queues[{j}] before any task was put: put first, then get"
    if not puts[j]:
        return f"a result was asked for from out_queues[{j}], but no task went into in_queues[{j}]"
    return f"{gets[j]} results were asked for from out_queues[{j}], but only {puts[j]} tasks went into in_queues[{j}]"


def must_meet(grade: Grade, result: Result) -> None:
    """Nobody has been told to go on alone."""
    events = result.ranks[0].events
    for event in (event for event in events if event.name == "alone"):
        (i, j), missing = event.data["place"], [tuple(place) for place in event.data["missing"]]
        seen = sorted({event.data["partition"] for event in events if event.name == "put"})
        if any(other.name == "enter" and other.data["in_caller"] for other in events):
            grade.fail(f"partition {j} works in the caller's own thread: hand its Task to in_queues[{j}]")
        absent = ", ".join(f"micro-batch {mi} in partition {mj}" for mi, mj in missing)
        grade.fail(
            f"partition {j} was at work on micro-batch {i} and waited for {absent}, which never came meanwhile: "
            f"{_why_alone(events, seen)}"
        )


def _why_alone(events: list, seen: list[int]) -> str:
    names = [event.name for event in events if event.name in ("put", "get")]
    if "get" in names and "put" in names[names.index("get") :]:
        return "put all tasks of a clock cycle before you get the first result, or the partitions work in turn"
    if len(seen) == 1:
        return f"all tasks went into in_queues[{seen[0]}]"
    return "the partitions are to work at the same time"
