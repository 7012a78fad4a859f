"""Bytes that a strategy is known to keep as long as training does, from its documentation and its sources.

Each function returns what the first worker keeps of parameters, gradients and AdamW's states in fp32. shapes: of all
parameters, each once. What the papers promise is in strategies.py, what is really there is counted by memory.py.
"""

import math
from collections.abc import Sequence

Shapes = Sequence[Sequence[int]]

ADAM = 16  # bytes of a parameter, its gradient and Adam's two numbers
WHOLE = 100_000  # stage3_param_persistence_threshold of configs/zero3*.json: parameters up to this size stay whole
BUCKET = 6_553_600  # reduce_bucket_size, elements: stage 3 keeps one for good


def everything(shapes: Shapes, workers: int) -> float:
    return ADAM * sum(map(math.prod, shapes))


def rows_dealt_out(shapes: Shapes, workers: int) -> float:
    """FSDP2 gives every worker the same number of rows; the last worker's part is padded."""
    return ADAM * sum(math.ceil(shape[0] / workers) * math.prod(shape[1:]) for shape in shapes)


def zero12(shapes: Shapes, workers: int) -> float:
    """DeepSpeed's stages 1 and 2 keep a master copy of their share, also in fp32, and one gradient whole."""
    total = sum(map(math.prod, shapes))
    return 4 * total + 16 * total / workers + 4 * _beyond_first_share(shapes, workers)


def zero12_offload(shapes: Shapes, workers: int) -> float:
    """Where the optimizer computes, the share's gradients are kept once more, and two buffers of the largest size."""
    sizes = [math.prod(shape) for shape in shapes]
    return 4 * sum(sizes) + 20 * sum(sizes) / workers + 8 * max(sizes)


def zero3(shapes: Shapes, workers: int, per_shard: int = 20) -> float:
    """Stage 3 keeps small parameters whole, and a bucket."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = sum(size for size in sizes if size <= WHOLE) if workers > 1 else 0
    return per_shard * sum(math.ceil(size / workers) for size in sizes) + 4 * whole + 4 * BUCKET


def zero3_offload(shapes: Shapes, workers: int) -> float:
    return zero3(shapes, workers, per_shard=24)


def _beyond_first_share(shapes: Shapes, workers: int) -> int:
    """DeepSpeed cuts the weights (and apart from them biases and norms) into equal shares, through a parameter if need
    be, and keeps that one's gradient whole: how many of its elements belong to the second worker."""
    beyond = 0
    for group in ([s for s in shapes if len(s) > 1], [s for s in shapes if len(s) < 2]):
        sizes = [math.prod(shape) for shape in group]
        end, position = math.ceil(sum(sizes) / workers), 0
        for size in sizes:
            position += size
            if position >= end:
                beyond += position - end
                break
    return beyond
