"""One row per rank: where it is, for whom it waits, and which collectives it has called."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

WAITS, COMPUTES, IDLE, FINISHED = "waits", "computes", "is idle", "has finished"
FAILED, DIED, STOPPED, SILENT = "failed", "died", "is stopped", "is silent"
STOPPED_FILE = "stopped.json"  # in the run's folder: the rows of a run that was stopped, for the report
COMPARING = "comparing the ranks"  # the launcher waits longer for a rank that prints this
HEADER = "where each rank was:"  # the launcher finds the table by it
# A rank that says one of these failed because rank 0 did; the launcher looks for the cause elsewhere.
RANK_0_LEFT, RANK_0_SAYS = "rank 0 exited before all workers had connected", "rank 0 says:"


@dataclass(frozen=True)
class Calls:
    """The collectives that one rank has called, as far as another needs them to compare."""

    total: dict[str, int] = field(default_factory=dict)  # name -> calls since the group was created
    first: int = 0  # the first iteration that is known, from 1; 0: before the first
    last: int = 0  # the iteration that has begun last
    changes: dict[int, list[str]] = field(default_factory=dict)  # iteration -> its calls, see `of`

    def of(self, iteration: int) -> list[str]:
        """Return the calls of an iteration, such as "all_reduce (16x4)". Most iterations are like the one before."""
        known = [number for number in self.changes if number <= iteration]
        return self.changes[max(known)] if known and iteration <= self.last else []

    def at(self, iteration: int, nth: int) -> str:
        """Return one call of an iteration, counted from 0; "" if it has not been made."""
        calls = self.of(iteration)
        return calls[nth] if nth < len(calls) else ""


@dataclass(frozen=True)
class Row:
    """The state of one rank, as it reports it or as another rank found out."""

    rank: int
    state: str  # one of the words above
    place: str = ""  # file:line
    call: str = ""  # the collective (or the thread's result) for which it waits; else the last collective
    collective: str = ""  # number and signature of that collective; "": a send or recv, or nothing
    iteration: int = 0  # from 1; 0: before the first
    phase: str = ""
    note: str = ""  # why it failed, or how it died
    calls: Calls = field(default_factory=Calls)
    takes_part: bool = False  # it compares, prints, and then stops
    threads: list[str] = field(default_factory=list)  # if several compute together: a line for each
    conclusion: str = ""  # what they show together

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Row":
        content = json.loads(text)
        calls = content.pop("calls")
        changes = {int(iteration): made for iteration, made in calls.pop("changes").items()}
        return cls(**content, calls=Calls(**calls, changes=changes))

    def display(self) -> dict[str, str]:
        """The cells of the table."""
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self.calls.total.items()))
        call = f"{'' if self.state == WAITS else 'last: '}{self.call}" if self.call else ""
        time = f"iteration {self.iteration}" if self.iteration else ""
        where = ", ".join(part for part in (self.note, call, self.place, time, self.phase) if part)
        return {"rank": str(self.rank), "state": self.state, "where": where, "calls": counts}

    def display_all(self) -> list[dict[str, str]]:
        """The same, and below it the cells of its threads, for the report."""
        return [self.display(), *({"rank": "", "state": "", "where": text, "calls": ""} for text in self.threads)]


def table(rows: Iterable[Row]) -> list[str]:
    """Return the rows as aligned lines for a terminal, under a header."""
    rows = list(rows)
    cells = [row.display() for row in rows]
    wide = {key: max([len(cell[key]) for cell in cells], default=0) for key in ("rank", "state")}
    lines = [HEADER]
    for row, cell in zip(rows, cells, strict=True):
        calls = f"; {cell['calls']}" if cell["calls"] else ""
        lines.append(f"  rank {cell['rank']:>{wide['rank']}}  {cell['state']:{wide['state']}}  {cell['where']}{calls}")
        lines += [f"    {thread}" for thread in row.threads]
    return lines


def names(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1 and 2" or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
