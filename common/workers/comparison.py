"""Concludes from the rows of all ranks: which rank left a collective out, called another one, or has died.

Two comparisons, because collectives are matched by their order alone:
    [1] call by call: the first call in which the ranks differ. It shows another collective, or another shape.
    [2] iteration by iteration: the first iteration in which the ranks made different numbers of calls. It shows a call
        that was left out although all calls look alike. The missing one is noticed only at the end, when a rank waits
        alone.
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
    calls = {(row.number, row.calls.at(row.number) if row.number is not None else row.rank) for row in waiting}
    return len(waiting) < len(rows) or len(calls) > 1


def conclude(rows: Sequence[Row]) -> str:
    """Return what the rows show in one sentence, or two where a rank ended and had called something else before."""
    # A rank that dies without an error of its own may have died of the difference: gloo aborts on unequal sizes.
    found = [*_failed(rows), *_difference(rows), *_died(rows)]
    if not found:
        found = [row.conclusion for row in rows if row.conclusion]
    if not found:
        found = _waited_for(rows)
    return "; ".join(found) or "the ranks called the same collectives: their connection was lost"


def _failed(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if row.state == FAILED]
    return [f"rank {row.rank} failed{_when(row.iteration) if row.iteration else ''}: {row.note}" for row in failed]


def _died(rows: Sequence[Row]) -> list[str]:
    return [f"rank {row.rank} died ({row.note})" for row in rows if row.state == DIED]


def _waited_for(rows: Sequence[Row]) -> list[str]:
    late = [row for row in rows if row.state in _WAITED_FOR]
    waiting = [row.rank for row in rows if row.state == WAITS]
    if late and waiting:
        where = [f"rank {row.rank} {row.state}" + (f" at {row.place}" if row.place else "") for row in late]
        return [
            f"{names(waiting)} {_verb(waiting, 'wait')} for {names([row.rank for row in late])}: {', '.join(where)}"
        ]
    if late:
        return [", ".join(f"rank {row.rank} {row.state}" + (f" at {row.place}" if row.place else "") for row in late)]
    if done := [row.rank for row in rows if row.state == FINISHED]:
        return [f"{names(done)} {'has' if len(done) == 1 else 'have'} finished"]
    if len(waiting) == len(rows):
        return ["every rank waits: " + ", ".join(f"rank {row.rank} in {row.call} at {row.place}" for row in rows)]
    return []


def _difference(rows: Sequence[Row]) -> list[str]:
    """The first difference between the ranks' calls, and their counts; nothing if each has made the same so far."""
    calls = {row.rank: row.calls for row in rows if row.calls.sequence or row.state == FINISHED}
    if len(calls) < 2:
        return []
    finished = [row.rank for row in rows if row.state == FINISHED]
    sentence = _first_different_call(calls) or _first_different_iteration(calls, finished)
    return [sentence] if sentence else []


def _first_different_call(calls: Mapping[int, Calls]) -> str:
    start = max(one.first for one in calls.values())
    for number in range(start, max(one.end for one in calls.values())):
        here = {rank: one.at(number) for rank, one in calls.items() if one.at(number)}
        if len(set(here.values())) > 1:
            return _describe(calls, here, number)
    return ""


def _describe(calls: Mapping[int, Calls], here: Mapping[int, str], number: int) -> str:
    expected = _expected(calls, here, number)
    odd = [rank for rank, call in here.items() if call != expected]
    others = [rank for rank in here if rank not in odd]
    if not expected:
        each = ", ".join(f"rank {rank} called {call}" for rank, call in here.items())
        iteration, nth = calls[next(iter(here))].iteration_of(number)
        must = "all ranks must call the same collectives in the same order"
        return f"{each}{_when(iteration)}, call {nth + 1}: {must}"
    right, mine = calls[others[0]], calls[odd[0]]
    iteration, nth = right.iteration_of(number)
    before = _same_call_before(right, number + 1)
    if here[odd[0]] in (right.at(number + 1), before) and len({here[rank] for rank in odd}) == 1:
        return f"{names(odd)} left out {expected}{_when(iteration)}{_totals(calls, odd, others, expected)}"
    if mine.at(number + 1) == expected:
        return f"{names(odd)} called one more: {here[odd[0]]}{_when(iteration)}{_totals(calls, odd, others, expected)}"
    called = ", ".join(f"rank {rank} called {here[rank]}" for rank in odd)
    theirs = _the_others(others, here)
    return f"{called} where {theirs} called {expected}{_when(iteration)} (call {nth + 1} of that iteration)"


def _expected(calls: Mapping[int, Calls], here: Mapping[int, str], number: int) -> str:
    """Return what most ranks called; without a majority, what one called here in an earlier iteration; or ""."""
    counted = Counter(here.values()).most_common()
    if counted[0][1] > counted[1][1]:
        return counted[0][0]
    as_before = {call for rank, call in here.items() if _same_call_before(calls[rank], number) == call}
    return as_before.pop() if len(as_before) == 1 else ""


def _same_call_before(one: Calls, number: int) -> str:
    """Return the call at the same point of the iteration before, "" if there is none."""
    iteration, nth = one.iteration_of(number)
    start = dict(one.starts).get(iteration - 1)
    return one.at(start + nth) if start is not None and iteration > 1 else ""


def _first_different_iteration(calls: Mapping[int, Calls], finished: Sequence[int]) -> str:
    last = {rank: max(one.of_iteration, default=0) for rank, one in calls.items()}
    shared = max(min(one.of_iteration, default=0) for one in calls.values())
    for iteration in range(shared, max(last.values()) + 1):
        cells = {rank: one.of_iteration.get(iteration, {}) for rank, one in calls.items()}
        for name in sorted(set().union(*cells.values())):
            counts = {rank: cell.get(name, 0) for rank, cell in cells.items()}
            most = max(counts.values())
            # A rank that is still in this iteration may yet make the rest.
            is_over = {rank: rank in finished or last[rank] > iteration for rank in calls}
            if any(count < most and is_over[rank] for rank, count in counts.items()):
                return _unequal(calls, counts, name, iteration)
    return ""


def _unequal(calls: Mapping[int, Calls], counts: Mapping[int, int], name: str, iteration: int) -> str:
    """Return a sentence about an iteration in which the ranks made different numbers of calls to one collective."""
    usual = Counter(counts.values()).most_common()
    if len(usual) > 1 and usual[0][1] == usual[1][1]:  # no majority: what is usual in the other iterations?
        earlier = Counter(
            cell.get(name, 0) for one in calls.values() for at, cell in one.of_iteration.items() if 0 < at != iteration
        ).most_common()
        usual = [pair for pair in earlier if pair[0] in counts.values()] or [(max(counts.values()), 1)]
    odd = [rank for rank, count in counts.items() if count != usual[0][0]]
    others = [rank for rank in counts if rank not in odd]
    difference = counts[odd[0]] - usual[0][0]
    what = f"left {_number(-difference)} out" if difference < 0 else f"made {_number(difference)} too many"
    who = "it" if len(odd) == 1 else "they"
    totals = _totals(calls, odd, others, name).removeprefix(": ")
    return f"{totals or names(odd)}: {who} {what}{_when(iteration)}"


def _totals(calls: Mapping[int, Calls], odd: Sequence[int], others: Sequence[int], name: str) -> str:
    """ ": rank 1 has made 41 all_reduces, the others 42"; "" if the counts are equal."""
    name = name.split()[0]
    mine, theirs = ({calls[rank].total.get(name, 0) for rank in ranks} for ranks in (odd, others))
    if mine == theirs or len(mine) > 1 or len(theirs) > 1:
        return ""
    verb = "has" if len(odd) == 1 else "have"
    the_others = "the others" if len(others) > 1 else names(others)
    return f": {names(odd)} {verb} made {mine.pop()} {name}s, {the_others} {theirs.pop()}"


def _the_others(others: Sequence[int], here: Mapping[int, str]) -> str:
    return "the others" if len(others) > 1 or len(here) > 2 else names(others)


def _when(iteration: int) -> str:
    return f" in iteration {iteration}" if iteration else " before iteration 1"


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
