"""Predict the most memory that a step needs on a worker, by the account of the lessons (beyond/step_memory.py)."""

from benchmark.engines.engine import micro_batches
from benchmark.measure.architecture import describe
from benchmark.measure.state_bytes import BUCKET
from benchmark.names import is_own
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES
from beyond.step_memory import ADAM_TEMPORARIES, BYTES, Sizes, cut, fitting, peak, turning_point

FITTING = ("ddp", "own_zero1", "own_zero2", "own_zero3", "fsdp", "own_tensor", "own_1f1b")


def peak_bytes(strategy: str, model: str, workers: int, batch: int, length: int) -> float:
    """Return the most bytes that a step needs, on the worker with the most; in fp32. batch: examples of one worker."""
    sizes, cuts = describe(model, length).sizes, STRATEGIES[strategy].cuts
    if cuts:
        slices = {"tensor": workers, "grid": min(2, workers)}.get(cuts, 1)
        stages = workers if cuts == "pipeline" else 1
        examples = batch * stages * slices  # of a replica
        count = micro_batches(examples, stages) if stages > 1 else 1
        return peak("1f1b" if stages > 1 else "tensor", cut(sizes, slices), examples / count, stages, count)
    if zero := STRATEGIES[strategy].zero:
        return _deepspeed(zero[0], kept_bytes(strategy, model, workers, length), sizes, batch, workers)
    return peak(strategy.removeprefix("own_"), sizes, batch, workers)


def _deepspeed(stage: int, kept: float, sizes: Sizes, batch: int, workers: int) -> float:
    """Return the peak of DeepSpeed, whose optimizer works on flat tensors; kept: with gradients, which come last."""
    whole, shard, computing = sizes.parameters, sizes.parameters / workers, turning_point(sizes, batch)
    if stage == 0:  # all gradients once more, as one message
        return max(kept - whole + computing, kept + whole)
    if stage == 3:  # all parameters are whole from forward to backward; gloo gathers into a copy
        return kept + whole + max(whole, computing)
    # While computing there is a bucket; the update has the shard's gradients once more, and Adam's temporary tensors.
    return max(kept - shard + BYTES * BUCKET + computing, kept + (1 + ADAM_TEMPORARIES) * shard)


def kept_bytes(strategy: str, model: str, workers: int, length: int) -> float:
    """Return the bytes of parameters, gradients and optimizer state on the first worker: as documented, or ideal."""
    architecture, row = describe(model, length), STRATEGIES[strategy]
    documented = row.documented_bytes(architecture.shapes, workers)
    return row.ideal_bytes(architecture.elements, workers) if documented is None else documented


def predicted_peak(settings: Settings) -> float | None:
    """Return peak_bytes of a run; None if there is no prediction: own models, other precisions, a given --grid."""
    if is_own(settings.model) or settings.precision != "fp32" or settings.grid:
        return None
    return peak_bytes(settings.strategy, settings.model, settings.world_size, settings.batch_size, settings.length)


def what_would_fit(settings: Settings) -> str:
    """Return, for the message of --memory_limit_mb, what a step needs by the prediction, and which strategies fit."""
    is_gpt2 = describe(settings.model, settings.length).kind == "gpt2"
    names = [settings.strategy, *FITTING] if is_gpt2 else [settings.strategy, *FITTING[:-2]]
    peaks = {
        name: peak_bytes(name, settings.model, settings.world_size, settings.batch_size, settings.length)
        for name in dict.fromkeys(names)
    }
    return fitting(settings.strategy, peaks, settings.world_size, settings.memory_limit_mb)
