"""What a rank does in a step, as a list of instructions; strategies write these lists, simulate.py runs them.

A rank has one thread that computes, and a network that works beside it:

    program     | Compute | Start a | Compute | Start b | Compute | Wait a, b | Compute
    network               |======== a ========|======= b =======|

Ranks that do the same are one kind, and one of them is simulated.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.cost.architecture import Architecture, Weight
from benchmark.cost.calibration import Profile
from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes
from benchmark.strategies import STRATEGIES, one_process
from common.errors import InputError
from common.timeline.boxes import Phase


@dataclass(frozen=True)
class Compute:
    """Seconds of work for this rank's thread, as calibrated with all workers of the machine computing.

    engine: this is what the framework itself costs, beyond the arithmetic. micro_batch: its number, in a pipeline.
    """

    phase: Phase
    seconds: float
    engine: bool = False
    micro_batch: int | None = None


@dataclass(frozen=True)
class Start:
    """Start an operation and go on. It begins when all kinds in `members` have started `key`.

    key: the same on all members, and used once in a step. operation: as in collective_times.py; a hop is a message from
    the first member to the second. bytes: handed in by this rank. workers: ranks that take part in one such operation.
    members: their kinds. repeats: so many of them, one after the other (the rounds of a ring). connection: of a hop;
    see simulate.py.
    """

    key: str
    operation: str
    bytes: float
    workers: int
    members: tuple[int, ...]
    repeats: int = 1
    connection: str = ""

    @property
    def senders(self) -> tuple[int, ...]:
        """Return the kinds whose bytes these are."""
        return self.members[:1] if self.operation == "hop" else self.members


@dataclass(frozen=True)
class Wait:
    """Go on when the operation `key` is complete."""

    key: str


Instruction = Compute | Start | Wait


@dataclass(frozen=True)
class Kind:
    """Ranks that run the same program: `ranks` are their numbers, the first stands for all."""

    ranks: Sequence[int]
    program: tuple[Instruction, ...]


class Writer:
    """The program of one kind of ranks, from the first instruction to the last.

    ready: the parameters in the order in which backward completes their gradients.
    """

    def __init__(self, times: ComputeTimes, kind: int = 0, batch: float | None = None) -> None:
        self.cell, self.times, self.kind = times.cell, times, kind
        self.model: Architecture = times.architecture
        self.step: Profile = times.step(self.cell.batch if batch is None else batch)
        weights = {weight.name: weight for weight in self.model.weights}
        self.ready = [weights[name] for name in self.step.backward]
        self.instructions: list[Instruction] = []
        self._count = 0

    @property
    def workers(self) -> int:
        return self.cell.workers

    def compute(self, phase: Phase, seconds: float) -> None:
        if seconds > 0:
            self.instructions.append(Compute(phase, seconds))

    def copy(self, phase: Phase, size: float, passes: float = 1.0) -> None:
        self.compute(phase, self.times.copies(size, passes))

    def start(self, operation: str, size: float, repeats: int = 1) -> str:
        """Start an operation of all workers, which are all of this kind; return its key."""
        key = f"{operation} {self._count}"
        self._count += 1
        if self.workers > 1:
            self.instructions.append(Start(key, operation, size, self.workers, (self.kind,), repeats))
        return key

    def wait(self, *keys: str) -> None:
        if self.workers > 1:
            self.instructions += [Wait(key) for key in keys]

    def call(self, operation: str, size: float, repeats: int = 1) -> None:
        """An operation that is waited for at once."""
        self.wait(self.start(operation, size, repeats))

    def forward(self) -> None:
        self.compute("forward", sum(self.step.forward.values()))

    def backward(self) -> None:
        self.compute("backward", sum(self.step.backward.values()) + self.step.tail)

    def update(self, sizes: Sequence[float]) -> None:
        """Clip, update, and drop the gradients of tensors with so many elements each."""
        self.compute("optimizer", self.times.update(sizes))

    def updated(self) -> list[Instruction]:
        """Return the program, which ends with the update of the whole model."""
        self.update([weight.elements for weight in self.model.weights])
        return self.instructions


def cut(weights: Iterable[Weight], size: int) -> list[list[Weight]]:
    """Return the parameters in buckets of at most `size` bytes: what does not fit any more begins a new one."""
    buckets: list[list[Weight]] = []
    for weight in weights:
        if not buckets or sum(member.bytes for member in buckets[-1]) + weight.bytes > size:
            buckets.append([])
        buckets[-1].append(weight)
    return buckets


def programs(times: ComputeTimes) -> list[Kind]:
    """Return what every kind of ranks does in a step; raises InputError where it cannot be run."""
    cell = times.cell
    check(cell)
    row = STRATEGIES[cell.strategy]
    file, name = row.program.split(":")
    program = getattr(importlib.import_module(f"benchmark.cost.programs.{file}"), name)
    if row.cuts:  # stages differ
        kinds: list[Kind] = program(times)
        return kinds
    return [Kind(range(cell.workers), tuple(program(Writer(times))))]


def check(cell: Cell) -> None:
    """Raise InputError for what no machine can run, and for what offloading costs, which nothing here describes."""
    if cell.strategy.endswith("_offload"):
        raise InputError(f"--strategy {cell.strategy} is not predicted; use {cell.strategy.removesuffix('_offload')}")
    if one_process in STRATEGIES[cell.strategy].limits and cell.workers > 1:
        raise InputError(f"--strategy {cell.strategy} runs on one worker, got {cell.workers}; use ddp")
