"""Concludes from the rows of all ranks: which rank left a collective out, called another one, or has died.

Collectives are matched by their order alone. So the ranks' calls are compared in order, iteration by iteration. If all
calls look alike, a missing one shows only when its iteration is over: another call has taken its place until then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from common.workers.rows import COMPUTES, DIED, FAILED, FINISHED, IDLE, SILENT, STOPPED, WAITS, Calls, Row, names

_WAITED_FOR = (COMPUTES, IDLE, STOPPED, SILENT)


def is_deadlock(rows: Sequence[Row]) -> bool:
    """Return whether nobody can continue: all wait or have finished, and not all in the same call.

    All in the same call is a slow or broken network: --hang_seconds ends that.
    """
    waiting = [row for row in rows if row.state == WAITS]
    if not waiting or len(waiting) + sum(row.state == FINISHED for row in rows) < len(rows):
        return False
    return len(waiting) < len(rows) or len({row.collective or f"of rank {row.rank}" for row in waiting}) > 1


def conclude(rows: Sequence[Row]) -> str:
    """Return what the rows show in one sentence, or two where a rank ended and had called something else before."""
    # A rank that dies without an error of its own may have died of the difference: gloo aborts on unequal sizes.
    conclusions = [*_failed(rows), *_difference(rows), *_died(rows)]
    if not conclusions:
        conclusions = [row.conclusion for row in rows if row.conclusion]
    if not conclusions:
        conclusions = _waited_for(rows)
    return "; ".join(conclusions) or "the ranks called the same collectives: their connection was lost"


def _failed(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if row.state == FAILED]
    return [f"rank {row.rank} failed{_when(row.iteration) if row.iteration else ''}: {row.note}" for row in failed]


def _died(rows: Sequence[Row]) -> list[str]:
    return [f"rank {row.rank} died ({row.note})" for row in rows if row.state == DIED]


def _waited_for(rows: Sequence[Row]) -> list[str]:
    late = [row for row in rows if row.state in _WAITED_FOR]
    waiting = [row.rank for row in rows if row.state == WAITS]
    if late:
        where = ", ".join(f"rank {row.rank} {row.state}" + (f" at {row.place}" if row.place else "") for row in late)
        if not waiting:
            return [where]
        verb = "waits" if len(waiting) == 1 else "wait"
        return [f"{names(waiting)} {verb} for {names([row.rank for row in late])}: {where}"]
    if done := [row.rank for row in rows if row.state == FINISHED]:
        return [f"{names(done)} {'has' if len(done) == 1 else 'have'} finished"]
    if len(waiting) == len(rows):
        return ["every rank waits: " + ", ".join(f"rank {row.rank} in {row.call} at {row.place}" for row in rows)]
    return []


def _difference(rows: Sequence[Row]) -> list[str]:
    """The first difference between the ranks' calls; nothing if each has made the same so far."""
    finished = [row.rank for row in rows if row.state == FINISHED]
    calls = {row.rank: row.calls for row in rows if row.calls.total or row.rank in finished}
    if len(calls) < 2:
        return []
    first, last = max(one.first for one in calls.values()), max(one.last for one in calls.values())
    for iteration in range(first, last + 1):
        # A rank that is still in this iteration may yet make the rest.
        is_over = {rank: rank in finished or one.last > iteration for rank, one in calls.items()}
        for nth in range(max(len(one.of(iteration)) for one in calls.values())):
            here = {rank: one.at(iteration, nth) for rank, one in calls.items()}
            here = {rank: call for rank, call in here.items() if call or is_over[rank]}
            if len(set(here.values())) > 1:
                return [_describe(calls, here, iteration, nth)]
    return []


def _describe(calls: Mapping[int, Calls], here: Mapping[int, str], iteration: int, nth: int) -> str:
    """Return a sentence about the first call in which ranks differ. here: what each called, "" for no call."""
    expected = _expected(calls, here, iteration, nth)
    if expected is None:
        each = ", ".join(f"rank {rank} called {call or 'nothing'}" for rank, call in here.items())
        must = "all ranks must call the same collectives in the same order"
        return f"{each}{_when(iteration)}, call {nth + 1}: {must}"
    odd = [rank for rank, call in here.items() if call != expected]
    others = [rank for rank in here if rank not in odd]
    odd_calls, other_calls, called = calls[odd[0]], calls[others[0]], here[odd[0]]
    is_one = len({here[rank] for rank in odd}) == 1  # have all odd ones called the same?
    totals = _totals(calls, odd, others, expected or called)
    if is_one and len({*odd_calls.of(iteration), *other_calls.of(iteration)}) == 1:  # all look alike: which one is it?
        difference = len(odd_calls.of(iteration)) - len(other_calls.of(iteration))
        what = f"left {_number(-difference)} out" if difference < 0 else f"made {_number(difference)} too many"
        who = f"{totals}: {'it' if len(odd) == 1 else 'they'}" if totals else names(odd)
        return f"{who} {what}{_when(iteration)}"
    totals = totals and f": {totals}"
    next_call = (other_calls.at(iteration, nth + 1), other_calls.at(iteration - 1, nth + 1) if iteration > 1 else "")
    if is_one and (not called or called in next_call):
        return f"{names(odd)} left out {expected}{_when(iteration)}{totals}"
    if is_one and (not expected or odd_calls.at(iteration, nth + 1) == expected):
        return f"{names(odd)} called one more: {called}{_when(iteration)}{totals}"
    different = ", ".join(f"rank {rank} called {here[rank] or 'nothing'}" for rank in odd)
    the_others = "the others" if len(others) > 1 or len(here) > 2 else names(others)
    return f"{different} where {the_others} called {expected}{_when(iteration)} (call {nth + 1} of that iteration)"


def _expected(calls: Mapping[int, Calls], here: Mapping[int, str], iteration: int, nth: int) -> str | None:
    """Return what most ranks called; without a majority, what one called here in the iteration before; or None."""
    counted = Counter(here.values()).most_common()
    if counted[0][1] > counted[1][1]:
        return counted[0][0]
    as_before = {call for rank, call in here.items() if iteration > 1 and calls[rank].at(iteration - 1, nth) == call}
    if len(as_before) == 1:
        return as_before.pop()
    made = set(here.values()) - {""}
    return made.pop() if len(made) == 1 else None


def _totals(calls: Mapping[int, Calls], odd: Sequence[int], others: Sequence[int], name: str) -> str:
    """ "rank 1 has made 41 all_reduces, the others 42"; "" if the counts are equal."""
    name = name.split()[0]
    odd_counts, other_counts = ({calls[rank].total.get(name, 0) for rank in ranks} for ranks in (odd, others))
    if odd_counts == other_counts or len(odd_counts) > 1 or len(other_counts) > 1:
        return ""
    verb = "has" if len(odd) == 1 else "have"
    the_others = "the others" if len(others) > 1 else names(others)
    return f"{names(odd)} {verb} made {odd_counts.pop()} {name}s, {the_others} {other_counts.pop()}"


def _when(iteration: int) -> str:
    return f" in iteration {iteration}" if iteration else " before iteration 1"


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)
