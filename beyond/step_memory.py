"""Predict the most memory that a step needs on a worker: what stays, what forward keeps, blocks and messages.

Adam needs 16 bytes for a parameter in fp32: value, gradient and two states. What a strategy does not keep whole, it
still needs whole for a while, a block at a time. This code is given.

The highest point of a step depends on the strategy, so `peak` returns the highest of these:

    forward      | block 0 | block 1 | ... | loss |             activations grow
    backward                                      | ... | block 1 | block 0 | embeddings |
                                                   activations shrink, gradients of the ranks' shards grow
    finish, step                                                                           | messages | Adam |
"""

from dataclasses import dataclass, replace

from transformers import AutoConfig, PretrainedConfig

from common.config import BeyondConfig
from common.peak_memory import MB

BYTES = 4  # of a number in fp32
MESSAGES = {"zero2": 2, "zero3": 1}  # of gradients in transit; each is there twice: what is sent, and what arrives
MICRO_BATCHES = 4  # of 1f1b, as --n_chunk
DATA_PARALLEL = ("overlap", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model in fp32, and of what one example keeps for backward.

    blocks: their number. block, root: parameters of one block, and of all that is outside the blocks. matrix,
    embedding: the largest parameter of a block, and of the root.
    kept: activations of one block. whole: the part of it that tensor parallelism does not cut. loss: activations
    outside the blocks. logits: those of one example. border: the activations that a stage sends.
    """

    blocks: int
    block: int
    root: int
    matrix: int
    embedding: int
    kept: int
    whole: int
    loss: int
    logits: int
    border: int

    @property
    def parameters(self) -> int:
        return self.blocks * self.block + self.root


def gpt2_sizes(config: PretrainedConfig, length: int) -> Sizes:
    """Return the sizes of a GPT-2 by transformers' configuration, for examples of `length` tokens, without dropout."""
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    border, logits = (BYTES * length * size for size in (width, config.vocab_size))
    return Sizes(
        blocks=config.n_layer,
        block=BYTES * (width * (4 * width + 2 * inner) + 9 * width + inner),
        root=BYTES * width * (config.vocab_size + config.n_positions + 2),
        matrix=BYTES * width * max(3 * width, inner),
        embedding=BYTES * width * config.vocab_size,
        kept=9 * border + 5 * BYTES * length * inner,  # 9: two norms, q, k, v, attention; 5: gelu's pieces
        whole=4 * border,  # inputs of the two norms, and of the first matrix behind each
        loss=2 * border + logits,
        logits=logits,
        border=border,
    )


def cut(sizes: Sizes, slices: int) -> Sizes:
    """Return the sizes of a rank of a tensor group: its slice of every block."""
    activations = sizes.whole + (sizes.kept - sizes.whole) // slices
    return replace(sizes, block=sizes.block // slices, matrix=sizes.matrix // slices, kept=activations)


def peak(strategy: str, sizes: Sizes, batch: float, workers: int, micro_batches: int = 1) -> float:
    """Return the most bytes that a step needs on the worker with the most.

    strategy: as for --strategy; also single, and ddp, whose gradients stay in its buckets.
    sizes: with tensor and grid, those of a slice.
    batch: examples that a worker computes together; with 1f1b a micro-batch, and `workers` stages.
    """
    if strategy in ("zero2", "zero3"):
        return sent_during_backward(sizes, batch, workers, 0 if strategy == "zero2" else 2.5, 2 * MESSAGES[strategy])
    if strategy == "1f1b":
        return max(_stage(stage, sizes, batch, workers, micro_batches) for stage in range(workers))
    values = sizes.parameters
    buckets = values if strategy in ("ddp", "overlap") else 0
    states = 2 * values / (workers if strategy == "zero1" else 1)
    first = values + buckets + states + sizes.blocks * batch * sizes.kept
    last = 2 * values + states + 2 * sizes.embedding  # Adam computes with two more of the largest parameter
    if strategy == "zero1":
        gathered = 2 * (values / workers + sizes.block)  # as with zero2
        last = values + states + max(values + MESSAGES["zero2"] * sizes.block, gathered)
    if strategy == "overlap":  # at the end of the first step it makes its buckets again, in another order
        last += values
    return max(first + _loss(sizes, batch), first + sizes.embedding + 2 * sizes.matrix, last)


def _loss(sizes: Sizes, batch: float) -> float:
    return batch * (sizes.loss + 2 * sizes.logits)  # two: their gradient, and what it is computed from


def sent_during_backward(sizes: Sizes, batch: float, workers: int, gathered: float, messages: float) -> float:
    """Return the peak of a strategy that sends each block's gradients as soon as they are complete.

    gathered: how many blocks are whole while one computes, with what gloo needs to gather the next; 0: all stay whole.
    messages: the memory of those in transit, in blocks.
    """
    block, embedding, activations = sizes.block, sizes.embedding, batch * sizes.kept
    shard, whole = sizes.parameters / workers, gathered * block
    stays = 2 * shard + (shard + sizes.root if gathered else sizes.parameters)
    peaks = [stays + whole + sizes.blocks * activations + max(_loss(sizes, batch), embedding + 2 * sizes.matrix)]
    for sent in range(sizes.blocks):  # blocks whose gradients have been sent, when those of the next are complete
        # The embedding's gradient, from the end of the model, exists throughout backward.
        there = embedding + block * (1 + min(messages, 2 * sent)) + sent * block / workers
        peaks.append(stays + whole + (sizes.blocks - sent - 1) * activations + there)
    if not gathered:  # at the end of step, the new shards are copied and gathered; gloo works on two blocks at a time
        peaks.append(stays + 2 * shard + 2 * max(block, sizes.root))
    return max(peaks)


def _stage(stage: int, sizes: Sizes, batch: float, stages: int, micro_batches: int) -> float:
    """Return the peak of a stage of the schedule 1F1B."""
    here = sum(block * stages // sizes.blocks == stage for block in range(sizes.blocks))
    ends = (stage == 0) + (stage == stages - 1)
    values = here * sizes.block + (sizes.embedding if ends else 0)
    alive = min(stages - stage, micro_batches)
    borders = batch * sizes.border * (alive + micro_batches * (2 - ends))  # what has been sent is kept until the end
    loss = _loss(sizes, batch) if stage == stages - 1 else 0
    temporary = 2 * sizes.embedding if ends else 2 * sizes.matrix
    return 4 * values + max(alive * here * batch * sizes.kept + borders + max(loss, sizes.matrix), temporary)


def what_would_fit(config: BeyondConfig) -> str:
    """Return, for the message of --memory_limit_mb, what a step needs by the prediction, and which strategies fit."""
    workers, sizes = (
        config.world_size,
        gpt2_sizes(AutoConfig.from_pretrained(config.model_name_or_path), config.model_max_length),
    )
    share = config.batch_size / workers
    peaks = {name: peak(name, sizes, share, workers) for name in DATA_PARALLEL}
    peaks["tensor"] = peak("tensor", cut(sizes, workers), config.batch_size, workers)
    peaks["1f1b"] = peak("1f1b", sizes, config.batch_size / MICRO_BATCHES, workers, MICRO_BATCHES)
    peaks["ring"] = peak("ring", sizes, share, workers)
    return fitting(config.strategy, peaks, workers, config.memory_limit_mb)


def fitting(strategy: str, peaks: dict[str, float], workers: int, limit_mb: int | None) -> str:
    """Return the sentence; peaks: bytes by strategy on so many workers."""
    needs = f"by the prediction, {strategy} needs {peaks[strategy] / MB:,.0f} MB; " if strategy in peaks else ""
    others = {name: size for name, size in peaks.items() if name != strategy}
    fits = [f"{n} ({s / MB:,.0f} MB)" for n, s in others.items() if limit_mb and s <= limit_mb * MB]
    if workers == 1 or not fits:
        return f"{needs}use more workers with zero3, or a smaller model or batch"
    return f"{needs}these would fit: {', '.join(fits)}"
