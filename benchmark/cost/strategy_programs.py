"""What each strategy of the benchmark runs in a step, as programs for the simulator.

Adding one: a function that writes its program, and a line in SYMMETRIC; or, if stages differ, a case in pipelined.py.
"""

from collections.abc import Callable

from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes
from benchmark.cost.programs import pipelined, sharded, unsharded
from benchmark.cost.programs.program import Instruction, Kind
from benchmark.cost.programs.writer import Writer
from benchmark.names import STRATEGIES
from common.errors import InputError

SYMMETRIC: dict[str, Callable[[Writer], list[Instruction]]] = {
    "single": unsharded.single,
    "dp": unsharded.single,
    "ddp": unsharded.ddp,
    "zero0": unsharded.zero0,
    "own_ring": unsharded.own_ring,
    "own_overlap": unsharded.own_overlap,
    "own_zero1": sharded.own_zero1,
    "own_zero2": sharded.own_zero2,
    "own_zero3": sharded.own_zero3,
    "fsdp": sharded.fsdp,
    "zero1": sharded.zero12,
    "zero2": sharded.zero12,
    "zero3": sharded.zero3,
    "zero1_offload": sharded.zero12,
    "zero2_offload": sharded.zero12,
    "zero3_offload": sharded.zero3,
}
STAGED = ("pipeline", "tensor", "own_tensor", "own_1f1b", "own_grid")


def programs(cell: Cell, times: ComputeTimes) -> list[Kind]:
    """Return what every kind of ranks does in a step of the cell; raises InputError where it cannot be run."""
    check(cell)
    if cell.strategy in STAGED:
        return pipelined.on_grid(cell, times)
    return [Kind(range(cell.workers), tuple(SYMMETRIC[cell.strategy](Writer(cell, times))))]


def check(cell: Cell) -> None:
    """Raise InputError for what no machine can run."""
    if cell.strategy not in (*SYMMETRIC, *STAGED):
        raise InputError(f"--strategy: expected one of {', '.join(STRATEGIES)}; got {cell.strategy!r}")
    if cell.strategy in ("single", "dp") and cell.workers > 1:
        raise InputError(f"--strategy {cell.strategy} runs on one worker, got {cell.workers}; use ddp")
