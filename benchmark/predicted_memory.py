"""Predict the most memory that a step needs on a worker, by the account of the lessons (beyond/step_memory.py)."""

from benchmark.engines.engine import micro_batches
from benchmark.measure.architecture import describe
from benchmark.predicted_step import BUCKET, small_parameters
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
    """Return the bytes that a worker has between two steps: as DeepSpeed is known to keep them, or by the papers."""
    architecture, row = describe(model, length), STRATEGIES[strategy]
    whole = BYTES * architecture.elements
    stage = row.zero[0] if row.zero else 0
    if not stage:
        return row.ideal_bytes(architecture.elements, workers)
    if stage == 3:  # with a master copy of the shard, and a bucket for good
        return 5 * whole / workers + BYTES * BUCKET + (sum(small_parameters(architecture)) if workers > 1 else 0)
    return whole + 4 * whole / workers


def what_would_fit(settings: Settings) -> str:
    """Return, for the message of --memory_limit_mb, what a step needs by the prediction, and which strategies fit."""
    is_gpt2 = describe(settings.model, settings.length).kind == "gpt2"
    names = [settings.strategy, *FITTING] if is_gpt2 else [settings.strategy, *FITTING[:-2]]
    peaks = {
        name: peak_bytes(name, settings.model, settings.world_size, settings.batch_size, settings.length)
        for name in dict.fromkeys(names)
    }
    return fitting(settings.strategy, peaks, settings.world_size, settings.memory_limit_mb)
