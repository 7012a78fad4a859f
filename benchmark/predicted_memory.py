"""Predict the most memory that a step needs on a worker, by the account of the lessons (beyond/step_memory.py)."""

from benchmark.measure.architecture import Architecture, describe
from benchmark.names import is_own
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES
from beyond.step_memory import cut, fitting, sent_during_backward
from beyond.step_memory import peak as of_lesson

FITTING = ("ddp", "own_zero1", "own_zero2", "own_zero3", "fsdp", "own_tensor", "own_1f1b")
CHUNKS_A_STAGE = 4


def peak_bytes(strategy: str, model: str, workers: int, batch: int, length: int) -> float:
    """Return the most bytes that a step needs, on the worker with the most; in fp32. batch: examples of one worker."""
    architecture, row = describe(model, length), STRATEGIES[strategy]
    sizes = architecture.sizes
    if row.cuts:
        slices = {"tensor": workers, "grid": min(2, workers)}.get(row.cuts, 1)
        stages = workers if row.cuts == "pipeline" else 1
        replica = batch * stages * slices
        count = micro_batches(replica, stages)
        return of_lesson("1f1b" if stages > 1 else "tensor", cut(sizes, slices), replica / count, stages, count)
    if strategy == "fsdp":  # of a reduce_scatter, a part arrives
        return sent_during_backward(sizes, batch, workers, gathered=2, messages=1)
    if row.zero:  # DeepSpeed keeps its buffers
        return (
            _kept_bytes(strategy, architecture, workers)
            + batch * (sizes.blocks * sizes.kept + sizes.loss)
            + (sizes.embedding + 2 * sizes.matrix)
        )
    return of_lesson(strategy.removeprefix("own_"), sizes, batch, workers)


def predicted_peak(settings: Settings) -> float | None:
    """Return peak_bytes of a run; None if there is no prediction: own models, other precisions, a given --grid."""
    if is_own(settings.model) or settings.precision != "fp32" or settings.grid:
        return None
    return peak_bytes(settings.strategy, settings.model, settings.world_size, settings.batch_size, settings.length)


def micro_batches(examples: int, stages: int) -> int:
    """Return into how many micro-batches a replica's examples are cut: as many as divide them, up to four a stage."""
    most = CHUNKS_A_STAGE * stages if stages > 1 else 1
    return max(count for count in range(1, min(examples, most) + 1) if examples % count == 0)


def what_would_fit(settings: Settings) -> str:
    """Return, for the message of --memory_limit_mb, what a step needs by the prediction, and which strategies fit."""
    is_gpt2 = describe(settings.model, settings.length).kind == "gpt2"
    names = [settings.strategy, *FITTING] if is_gpt2 else [settings.strategy, *FITTING[:-2]]
    peaks = {
        name: peak_bytes(name, settings.model, settings.world_size, settings.batch_size, settings.length)
        for name in dict.fromkeys(names)
    }
    return fitting(settings.strategy, peaks, settings.world_size, settings.memory_limit_mb)


def _kept_bytes(strategy: str, architecture: Architecture, workers: int) -> float:
    documented = STRATEGIES[strategy].documented_bytes(list(architecture.shapes), workers)
    assert documented is not None, strategy
    return documented
