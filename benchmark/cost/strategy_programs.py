"""What each strategy of the benchmark runs in a step, as programs for the simulator; its row names the function."""

import importlib

from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes
from benchmark.cost.programs.program import Kind
from benchmark.cost.programs.writer import Writer
from benchmark.strategies import STRATEGIES, one_process
from common.errors import InputError


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
