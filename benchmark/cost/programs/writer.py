"""What each strategy runs in a step, as programs for the simulator; a Writer has what strategies have in common."""

import importlib
from collections.abc import Sequence

from benchmark.cost.architecture import Architecture
from benchmark.cost.calibration import Profile
from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes
from benchmark.cost.programs.program import Compute, Instruction, Kind, Start, Wait
from benchmark.strategies import STRATEGIES, one_process
from common.errors import InputError
from common.timeline.boxes import Phase


class Writer:
    """The program of one kind of ranks, from the first instruction to the last."""

    def __init__(self, cell: Cell, times: ComputeTimes, kind: int = 0, batch: float | None = None) -> None:
        self.cell, self.times, self.kind = cell, times, kind
        self.model: Architecture = times.architecture
        self.step: Profile = times.step(cell.batch if batch is None else batch)
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


def programs(cell: Cell, times: ComputeTimes) -> list[Kind]:
    """Return what every kind of ranks does in a step of the cell; raises InputError where it cannot be run."""
    check(cell)
    row = STRATEGIES[cell.strategy]
    file, name = row.program.split(":")
    program = getattr(importlib.import_module(f"benchmark.cost.programs.{file}"), name)
    if row.cuts:  # stages differ
        kinds: list[Kind] = program(cell, times)
        return kinds
    return [Kind(range(cell.workers), tuple(program(Writer(cell, times))))]


def check(cell: Cell) -> None:
    """Raise InputError for what no machine can run, and for what offloading costs, which nothing here describes."""
    if cell.strategy.endswith("_offload"):
        raise InputError(f"--strategy {cell.strategy} is not predicted; use {cell.strategy.removesuffix('_offload')}")
    if one_process in STRATEGIES[cell.strategy].limits and cell.workers > 1:
        raise InputError(f"--strategy {cell.strategy} runs on one worker, got {cell.workers}; use ddp")
