"""One row per rank: where it is and what it has called; and what the rows of all ranks say together."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

STOPPED_FILE = "stopped.json"  # in the run's folder: the report of a run that was stopped, for submit.py
LAUNCHED = "COS598D_LAUNCHED"  # a variable that cluster/guard.py sets: the launcher reads the report and prints it
REPORT_MARK = "\x1e"  # begins a line that is a report in JSON (as in RFC 7464)


class NotedCall(NamedTuple):
    """A collective, a send or a recv of one rank. (A dataclass would take three times as long to write.)"""

    nth: int  # of all calls of the rank
    group: str
    number: int  # among the collectives of the group, from 1; 0 for a send or a recv
    name: str
    tensors: str  # the shapes that must agree, such as (16x4)
    place: str  # file:line
    iteration: int

    @property
    def signature(self) -> str:
        """What must be equal on all ranks of the group."""
        return f"{self.name} {self.tensors}".strip()

    def __str__(self) -> str:
        return f"{self.name} #{self.number} {self.tensors}".strip() if self.number else self.name


class State(StrEnum):
    """What a rank does, in words for the table."""

    WAITS = "waits"  # in a call that needs another rank
    COMPUTES = "computes"
    IDLE = "is idle"
    FINISHED = "has finished"
    FAILED = "failed"
    DIED = "died"
    SILENT = "does not answer"
    UNKNOWN = "unknown"

    def of(self, ranks: int) -> str:
        """Return the word for so many ranks."""
        several = {"waits": "wait", "computes": "compute", "has": "have", "does": "do", "is": "are"}
        first, *others = self.value.split()
        return " ".join([several.get(first, first), *others]) if ranks > 1 else self.value


@dataclass(frozen=True)
class RankRow:
    """The state of one rank, as it reports it or as another rank found out."""

    rank: int
    state: State
    place: str = ""  # file:line
    call: str = ""  # the collective (or the thread's result) for which it waits; else the last call
    iteration: int = 0  # from 1; 0: before the first
    phase: str = ""
    note: str = ""  # why it failed, or its process
    collectives: Mapping[str, int] = field(default_factory=dict)  # name -> calls
    per_iteration: Sequence[tuple[int, int]] = ()  # see Pulse.per_iteration
    calls: Sequence[NotedCall] = ()  # the last ones
    threads: Sequence[str] = ()  # if several compute together: a line for each
    conclusion: str = ""  # what the threads show together
    is_still: bool = False  # it has made no progress for too long

    @classmethod
    def from_message(cls, content: Mapping[str, Any]) -> "RankRow":
        changed = {"state": State(content["state"]), "calls": [NotedCall(*call) for call in content["calls"]]}
        return cls(**{**content, **changed})

    def cells(self) -> list[dict[str, str]]:
        """The cells of the table, and below them those of the threads."""
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self.collectives.items()))
        call = f"{'' if self.state == State.WAITS else 'last: '}{self.call}" if self.call else ""
        time = f"iteration {self.iteration}" if self.iteration else ""
        where = ", ".join(part for part in (self.note, call, self.place, time, self.phase) if part)
        own = {"rank": str(self.rank), "state": self.state.value, "where": where, "calls": counts}
        return [own, *({"rank": "", "state": "", "where": text, "calls": ""} for text in self.threads)]


@dataclass(frozen=True)
class HangReport:
    """What is said of a run that was stopped. rows: cells, see RankRow.cells."""

    conclusion: str
    rows: list[dict[str, str]]

    def lines(self) -> list[str]:
        """Return the table as aligned lines for a terminal, and the conclusion."""
        wide = {key: max(len(row[key]) for row in self.rows) for key in ("rank", "state")}
        lines = ["where each rank was:"]
        for row in self.rows:
            name = f"rank {row['rank']:>{wide['rank']}}  {row['state']:{wide['state']}}" if row["rank"] else " "
            lines.append(f"  {name}  {row['where']}" + (f"; {row['calls']}" if row["calls"] else ""))
        return [*lines, self.conclusion]


def make_report(rows: Sequence[RankRow], reason: str) -> HangReport:
    """Return the rows as a table, and what they show: a cause, or where each rank is. reason: why the run stops."""
    failed = [f"rank {row.rank} failed{_when(row.iteration)}: {row.note}" for row in rows if row.state == State.FAILED]
    # A rank that dies without an error of its own may have died of a difference: gloo aborts on unequal sizes.
    died = [f"rank {row.rank} died ({row.note})" for row in rows if row.state == State.DIED]
    causes = [*failed, *_unequal_iteration(rows)] or _unequal_call(rows)
    causes = [*causes, *died] or [row.conclusion for row in rows if row.conclusion] or [_where(rows)]
    conclusion = "; ".join(causes)
    return HangReport(
        f"{reason}: {conclusion}" if reason else conclusion, [cells for row in rows for cells in row.cells()]
    )


def names(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1 and 2", "ranks 0-3" or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _where(rows: Sequence[RankRow]) -> str:
    """Return, for instance, "rank 0 waits in gather #2 at run_glue.py:88; ranks 1-3 wait in scatter #2 at ..."."""
    ranks: dict[tuple[State, str], list[int]] = defaultdict(list)
    for row in rows:
        awaited = f" in {row.call}" if row.call and row.state == State.WAITS else ""
        at = awaited + (f" at {row.place}" if row.place else "")
        if row.state != State.UNKNOWN:
            ranks[row.state, f" ({row.note})" if row.state == State.SILENT else at].append(row.rank)
    return "; ".join(f"{names(same)} {state.of(len(same))}{at}" for (state, at), same in ranks.items())


def _unequal_call(rows: Sequence[RankRow]) -> list[str]:
    """Return a sentence about the first collective of a group in which ranks differ: their order alone matches them."""
    by_number: dict[tuple[int, str], dict[int, NotedCall]] = defaultdict(dict)
    for row in rows:
        for call in row.calls:
            if call.number:
                by_number[call.number, call.group][row.rank] = call
    for (number, _), calls in sorted(by_number.items()):
        if len({call.signature for call in calls.values()}) > 1:
            when = _when(next(iter(calls.values())).iteration)
            what = _who_called({rank: f"{call.signature} at {call.place}" for rank, call in calls.items()})
            return [f"collective #{number}{when}: {what}; all ranks must call the same ones in the same order"]
    return []


def _unequal_iteration(rows: Sequence[RankRow]) -> list[str]:
    """Return a sentence about the first iteration in which a rank made fewer collectives than others.

    If all their calls look alike, this shows only when the iteration is over: until then, another one is in its place.
    """
    known = [row for row in rows if row.per_iteration]
    for iteration in range(1, min((row.iteration for row in known), default=0)):
        counts = {row.rank: [made for at, made in row.per_iteration if at <= iteration][-1] for row in known}
        if len(set(counts.values())) > 1:
            return [f"in iteration {iteration}, " + _who_called({r: f"{n} collectives" for r, n in counts.items()})]
    return []


def _who_called(values: Mapping[int, str]) -> str:
    """Return "rank 1 called A, ranks 0 and 2 called B": those who differ from most come first."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return ", ".join(f"{names(same)} called {value}" for value, same in sorted(ranks.items(), key=lambda e: len(e[1])))


def _when(iteration: int) -> str:
    return f" in iteration {iteration}" if iteration else ""
