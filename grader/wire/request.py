"""What the grader asks of ranks: one frozen description of a run, from the graded test to the process of a rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grader.wire.values import Fields

DEADLINE = 15.0  # seconds for one run, which takes well under one; more under a slow autograder


@dataclass(frozen=True)
class Source:
    """Code that is sent to ranks: the file in the repository that it comes from, for tracebacks, and `before` lines of
    that file that come before it. As lines, since a text of more than 10,000 characters is cut on its way."""

    path: str
    before: int
    lines: Sequence[str]


@dataclass(frozen=True)
class RankFunction:
    """A function `(context, lesson, inputs)` that runs in every rank; made by @in_rank, which explains the fields."""

    name: str
    sources: Sequence[Source] = ()
    preload: Sequence[str] = ()
    first: str = ""
    join: bool = True
    allows: Sequence[str] = ()


@dataclass(frozen=True)
class Request:
    """One run of ranks.

    Args:
        inputs: for each rank what it alone starts with: a rank that knew the inputs of the others could compute their
            mean alone. There are as many ranks as inputs.
        file: the student's file, relative to the tree; "" for none.
        function: what each rank calls; None if it only loads the file, to see whether it can be loaded.
        arguments: what the function finds in `context.arguments`, the same on all ranks: numbers, strings, lists, dicts
            and arrays.
        deadline: seconds from the fork.
        payloads: whether the result keeps what each rank passed to its collectives; in_rank.run keeps it by default.
        measures: whether the memory of the ranks is measured, see Context.measure.
        libraries: groups of grader/inside/preload.py that loading the file needs.
        storages: what is in each of the storages that Context.storage opens: name -> bytes. Without any, a rank that
            uses one is disbelieved: it would reach the others past the collectives.
        full: (rank, n): its n-th put, from 1, and all later ones of this rank find no space.
    """

    inputs: Sequence[object]
    file: str = ""
    function: RankFunction | None = None
    arguments: Fields = field(default_factory=dict)
    deadline: float = DEADLINE
    payloads: bool = False
    measures: bool = False
    libraries: Sequence[str] = ()
    storages: Sequence[Mapping[str, bytes]] = ()
    full: tuple[int, int] | None = None

    @property
    def preload(self) -> list[str]:
        """Return all groups that the process that forks the ranks loads once for all of them."""
        return [*(self.function.preload if self.function else ()), *self.libraries]

    def within(self, seconds: float) -> "Request":
        """Return the same request with another deadline."""
        return replace(self, deadline=seconds)


@dataclass(frozen=True)
class Job:
    """One rank's part of a request. `stops`: in a run of grader.debug, the lines where this rank stops; None where it
    does not."""

    rank: int
    world_size: int
    tree: str
    file: str
    function: RankFunction | None
    inputs: Any
    arguments: Fields
    debugged: bool = False
    stops: Sequence[tuple[str, int]] | None = None

    def as_message(self) -> Fields:
        """Return the job as values that can be sent; `from_message` makes it again."""
        if self.function is None:
            return vars(self)
        return vars(self) | {"function": vars(self.function) | {"sources": [*map(vars, self.function.sources)]}}

    @classmethod
    def from_message(cls, message: Fields) -> "Job":
        """Return the job that was sent."""
        function = message["function"]
        if function is None:
            return cls(**message)
        sources = [Source(**source) for source in function["sources"]]
        return cls(**message | {"function": RankFunction(**function | {"sources": sources})})
