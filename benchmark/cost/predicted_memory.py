"""Predict the memory of one worker: by the papers, as the engine keeps it, and what a step needs at its peak.

The peaks of the lessons are those of beyond/step_memory.py; here are those of the frameworks.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmark.cost.architecture import BYTES, Architecture
from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes
from benchmark.cost.programs.pipelined import elements_of_rank, micro_batches, on_stage
from benchmark.strategies import STRATEGIES
from common.errors import InputError

if TYPE_CHECKING:
    from benchmark.settings import Settings
    from beyond.step_memory import Sizes

FITTING = ("ddp", "own_zero1", "own_zero2", "own_zero3", "fsdp", "own_tensor", "own_1f1b")
STATES = 4  # parameter, gradient and Adam's two numbers, of 4 bytes each


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


def memory(times: ComputeTimes) -> Memory:
    """Return what the worker with the most memory needs."""
    cell, architecture = times.cell, times.architecture
    return Memory(
        textbook=STRATEGIES[cell.strategy].ideal_bytes(architecture.elements, cell.workers),
        kept=kept_bytes(cell, architecture),
        activations=cell.batch * architecture.activations,
        peak=peak(cell, architecture),
        process=times.small.process,
    )


def kept_bytes(cell: Cell, architecture: Architecture) -> float:
    """Return the bytes of parameters, gradients and optimizer as the engine keeps them, on the first worker."""
    row = STRATEGIES[cell.strategy]
    if row.cuts:
        elements = sum(elements_of_rank(weight, cell) for weight in on_stage(cell, architecture, 0))
        buffers = 0
        if cell.strategy == "pipeline" and cell.workers > 1:  # torch's PipelineStage has one for every micro-batch
            buffers = cell.batch * cell.workers * cell.length * architecture.width
        return BYTES * (STATES * elements + buffers)
    documented = row.documented_bytes([weight.shape for weight in architecture.weights], cell.workers)
    assert documented is not None, cell.strategy
    return documented


def peak(cell: Cell, architecture: Architecture) -> float:
    """Return the most bytes that a step needs, on the worker with the most."""
    from beyond.step_memory import cut, sent_during_backward  # here: it loads transformers
    from beyond.step_memory import peak as of_lesson

    sizes, name, workers = sizes_of(architecture), cell.strategy.removeprefix("own_"), cell.workers
    if STRATEGIES[cell.strategy].cuts:
        count, stages, slices = micro_batches(cell), cell.grid.pipeline, cell.grid.tensor
        batch = cell.batch * stages * slices / count
        return of_lesson("1f1b" if stages > 1 else "tensor", cut(sizes, slices), batch, stages, count)
    if cell.strategy == "fsdp":
        return sent_during_backward(
            sizes, cell.batch, workers, gathered=2, messages=1
        )  # reduce_scatter: a part arrives
    if STRATEGIES[cell.strategy].zero:  # DeepSpeed keeps its buffers
        temporary = sizes.embedding + 2 * sizes.matrix
        return kept_bytes(cell, architecture) + cell.batch * architecture.activations + temporary
    return of_lesson(name, sizes, cell.batch, workers)


def sizes_of(architecture: Architecture) -> "Sizes":
    """Return what the lessons' predictions need to know of a model."""
    from beyond.step_memory import Sizes

    border = BYTES * architecture.length * architecture.width
    loss = int(2 * border + architecture.logits)
    blocks = architecture.n_blocks
    inside = [weight for weight in architecture.weights if weight.block is not None]
    root = architecture.of_block(None)
    return Sizes(
        blocks=blocks,
        block=sum(weight.bytes for weight in inside) // blocks,
        root=sum(weight.bytes for weight in root),
        matrix=max(weight.bytes for weight in inside),
        embedding=max(weight.bytes for weight in root),
        kept=int(architecture.activations - loss) // blocks,
        whole=4 * border,
        loss=loss,
        logits=int(architecture.logits),
        border=border,
    )


def check_fit(cell: Cell, needed: Memory, available: float, sharing: int) -> None:
    """Raise InputError if `sharing` workers of a machine need more than the `available` bytes that it has."""
    if sharing * needed.needed > available:
        raise InputError(
            f"--batch_size {cell.batch} does not fit: {sharing} workers of a machine need {needed.needed / 1e9:.1f} GB "
            f"each ({needed.kept / 1e9:.1f} kept, {needed.activations / 1e9:.1f} of activations), and it has "
            f"{available / 1e9:.1f} GB; use a smaller batch, more sharding, or --memory_gb for another machine"
        )


def what_would_fit(settings: "Settings") -> str:
    """Return, for the message of --memory_limit_mb, what a step needs by the prediction, and which strategies fit."""
    from benchmark.cost.architecture import describe
    from beyond.step_memory import fitting

    here = Cell(settings.strategy, settings.model, settings.world_size, settings.batch_size, settings.length)
    architecture = describe(settings.model, settings.length)
    names = [settings.strategy, *FITTING] if architecture.kind == "gpt2" else [settings.strategy, *FITTING[:-2]]
    peaks = {name: peak(replace(here, strategy=name), architecture) for name in dict.fromkeys(names)}
    return fitting(settings.strategy, peaks, settings.world_size, settings.memory_limit_mb)
