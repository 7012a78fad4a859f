"""Predict the memory of one worker: by the textbook, as the engine keeps it, and at its peak.

The peak is reached when backward begins: parameters, optimizer and what forward has kept for backward are there, and
the first gradient, that of the logits. Gradients of parameters are not, unless they lie in a strategy's own buckets.
"""

from dataclasses import dataclass

from benchmark.cost.architecture import BYTES, Architecture
from benchmark.cost.cell import Cell
from benchmark.cost.programs.stage_split import elements_of_rank, micro_batches, on_stage, one_forward_one_backward
from common.errors import InputError

STATES = 4  # parameter, gradient and Adam's two numbers, of 4 bytes each
LOGITS = 2  # beside what forward keeps: their gradient, and a copy of it while it is computed
IN_BUCKETS = ("ddp", "own_overlap")  # their gradients stay when a step ends


@dataclass(frozen=True)
class Memory:
    """Bytes of a worker. textbook, kept: parameters, gradients, optimizer. process: libraries and Python."""

    textbook: float
    kept: float
    activations: float
    peak: float
    process: float

    @property
    def needed(self) -> float:
        return self.peak + self.process


def memory(cell: Cell, architecture: Architecture, process: float = 0.0) -> Memory:
    """Return what the worker with the most memory needs."""
    from benchmark.measure.memory import textbook  # here: it loads torch

    by_the_book = textbook(cell.strategy, architecture.elements, cell.workers)
    keeps = kept(cell, architecture)
    gradients = 0.0 if cell.strategy in IN_BUCKETS else _gradients(cell, architecture)
    activations, logits = _alive(cell, architecture)
    peak = max(keeps, keeps - gradients + activations + LOGITS * logits)
    return Memory(by_the_book, keeps, activations, peak, process)


def kept(cell: Cell, architecture: Architecture) -> float:
    """Return the bytes of parameters, gradients and optimizer as the engine keeps them, on the first worker."""
    if cell.grid is not None:
        mine = sum(elements_of_rank(weight, cell.tensor) for weight in on_stage(cell, architecture, 0))
        # torch's PipelineStage keeps a buffer for every micro-batch that it receives.
        buffers = cell.batch * cell.stages * cell.length * architecture.width if cell.strategy == "pipeline" else 0
        return STATES * BYTES * mine + (BYTES * buffers if cell.stages > 1 else 0)
    from torch import Size

    from benchmark.measure.memory import known

    found = known(cell.strategy, [Size(weight.shape) for weight in architecture.weights], cell.workers)
    assert found is not None, cell.strategy
    return found


def _gradients(cell: Cell, architecture: Architecture) -> float:
    """Bytes of gradients that are there after backward and not when the next one begins."""
    if cell.grid is not None:
        return kept(cell, architecture) / STATES
    is_sharded = cell.strategy.startswith(("own_zero2", "own_zero3", "fsdp"))
    if cell.strategy.startswith("zero") and cell.strategy != "zero0":
        return 0.0  # DeepSpeed's own buffers stay
    return BYTES * architecture.elements / (cell.workers if is_sharded else 1)


def _alive(cell: Cell, architecture: Architecture) -> tuple[float, float]:
    """Bytes that forward has kept when the most is there, and bytes of the logits that are computed at a time."""
    if cell.grid is None:
        return cell.batch * architecture.activations, cell.batch * architecture.logits
    stages, count = cell.stages, micro_batches(cell)
    size = cell.batch * stages * cell.tensor / count  # examples of a micro-batch
    most = 0
    alive = 0
    for direction, _ in one_forward_one_backward(0, stages, count):
        alive += 1 if direction == "forward" else -1
        most = max(most, alive)
    here = sum(weight.block is not None for weight in on_stage(cell, architecture, 0))
    share = here / max(1, sum(weight.block is not None for weight in architecture.weights))
    whole = architecture.activations - (0.0 if stages == 1 else LOGITS * architecture.logits)
    return most * size * whole * share / cell.tensor, size * architecture.logits if stages == 1 else 0.0


def check_fit(cell: Cell, needed: Memory, available: float, sharing: int) -> None:
    """Raise InputError if `sharing` workers of a machine need more than the `available` bytes that it has."""
    if sharing * needed.needed > available:
        raise InputError(
            f"--batch_size {cell.batch} does not fit: {sharing} workers of a machine need {needed.needed / 1e9:.1f} GB "
            f"each ({needed.kept / 1e9:.1f} kept, {needed.activations / 1e9:.1f} of activations), and it has "
            f"{available / 1e9:.1f} GB; use a smaller batch, more sharding, or --memory_gb for another machine"
        )


def what_would_fit(settings) -> str:
    return "use x"
