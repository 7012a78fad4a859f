"""Predict the most memory that a step needs on a worker, by the account of the lessons (beyond/step_memory.py)."""

from benchmark.engines.engine import micro_batches
from benchmark.measure.architecture import describe
from benchmark.predicted_step import BUCKET, small_parameters
from benchmark.strategies import STRATEGIES
from beyond.step_memory import ADAM_TEMPORARIES, BYTES, Sizes, cut, peak, turning_point


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
        small = sum(small_parameters(describe(model, length))) if workers > 1 else 0
        return _deepspeed(zero[0], sizes, small, batch, workers)
    return peak(strategy.removeprefix("own_"), sizes, batch, workers)


def _deepspeed(stage: int, sizes: Sizes, small: int, batch: int, workers: int) -> float:
    """Return the peak of DeepSpeed, whose optimizer works on flat tensors. small: what stage 3 keeps whole."""
    whole, shard, computing = sizes.parameters, sizes.parameters / workers, turning_point(sizes, batch)
    if stage == 0:  # all gradients once more, as one message
        return max(3 * whole + computing, 5 * whole)
    # Parameters, gradient, two states and a master copy; in stages 1 and 2, the parameters are whole.
    kept, bucket = 4 * shard, BYTES * BUCKET
    if stage == 3:  # all parameters are whole from forward to backward; gloo gathers into a copy
        return kept + shard + small + bucket + whole + max(whole, computing)
    # While computing there is a bucket; the update has the shard's gradients once more, and Adam's temporary tensors.
    return whole + max(kept - shard + bucket + computing, kept + (1 + ADAM_TEMPORARIES) * shard)
