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

# In these, every rank passes tensors of the same shape; in the others, only some ranks pass tensors.
_SAME_SHAPES = ("all_reduce", "all_gather", "broadcast", "reduce", "all_to_all")


@dataclass(frozen=True)
class Calls:
    """The collectives that one rank has called, as far as another needs them to compare."""

    total: dict[str, int] = field(default_factory=dict)  # name -> calls since the group was created
    of_iteration: dict[int, dict[str, int]] = field(default_factory=dict)  # the same for each of the last iterations
    first: int = 0  # number of the first call in `sequence`
    sequence: list[str] = field(default_factory=list)  # the last calls, such as "all_reduce (16x4)"
    starts: list[tuple[int, int]] = field(default_factory=list)  # iteration, number of its first call

    @property
    def end(self) -> int:
        return self.first + len(self.sequence)

    def at(self, number: int) -> str:
        """Return the call with this number, "" if it is not known."""
        return self.sequence[number - self.first] if self.first <= number < self.end else ""

    def iteration_of(self, number: int) -> tuple[int, int]:
        """Return the iteration of a call, and which call of the iteration it is, from 0."""
        before = [(iteration, start) for iteration, start in self.starts if start <= number]
        iteration, start = before[-1] if before else (0, self.first)
        return iteration, number - start


@dataclass(frozen=True)
class Explanation:
    """What the threads of one rank do, if several compute together, as the code that has started them sees it."""

    threads: list[str]  # a line for each, under the row of the rank
    conclusion: str = ""  # what they show together, "" if nothing
    waits_for: str = ""  # what the main thread waits for, "" if it does not wait for one of them
    place: str = ""  # file:line where it does


@dataclass(frozen=True)
class Row:
    """The state of one rank, as it reports it or as another rank found out."""

    rank: int
    state: str  # one of the words above
    place: str = ""  # file:line
    call: str = ""  # the collective (or the thread's result) for which it waits; else the last collective
    number: int | None = None  # of that collective; None: a send or recv, or nothing
    iteration: int = 0  # from 1; 0: before the first
    phase: str = ""
    note: str = ""  # why it failed, or how it died
    calls: Calls = field(default_factory=Calls)
    takes_part: bool = False  # it compares, prints, and then stops
    threads: list[str] = field(default_factory=list)  # of an Explanation, and what it concludes
    conclusion: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Row":
        content = json.loads(text)
        calls = content.pop("calls")
        cells = {int(iteration): counts for iteration, counts in calls.pop("of_iteration").items()}
        starts = [(iteration, number) for iteration, number in calls.pop("starts")]
        return cls(**content, calls=Calls(**calls, of_iteration=cells, starts=starts))

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


def signature(name: str, tensors: str) -> str:
    """Return what must agree between ranks: the collective and, where all pass the same shapes, these."""
    return f"{name} {tensors}" if name in _SAME_SHAPES else name


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
