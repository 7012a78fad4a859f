"""Predict the most memory that a step needs on a worker. This code is given.

Adam needs 16 bytes for a parameter in fp32: value, gradient and two states. A strategy keeps some of these whole and
divides the others among the workers. A step needs more for a while: activations, messages, whole blocks. So the memory
of a step has its highest point at one of a few moments. `peak` adds up what is alive at each of them, and returns the
largest sum:

    forward      | block 0 | block 1 | ... | loss |             activations grow
    turning point                                 ▲             all activations, and what the loss and the head need
    backward                                      | ... | block 1 | block 0 | embeddings |
                                                   activations shrink, gradients of the ranks' shards grow
    finish, step                                                                           | messages | Adam |
"""

from dataclasses import dataclass, replace

from transformers import AutoConfig, PretrainedConfig

from common.config import BeyondConfig
from common.peak_memory import MB

BYTES = 4  # of a number in fp32
MICRO_BATCHES = 4  # of 1f1b, as --n_chunk
DATA_PARALLEL = ("overlap", "zero1", "zero2", "zero3")

SENT_AND_RECEIVED = 2  # a message of gradients takes their place, and what arrives needs as much once more
ADAM_TEMPORARIES = 2  # tensors of a parameter's size that Adam computes with, one parameter after the other
GRADIENT_COPIES = 2  # backward computes a gradient, then stores it: both are alive for a moment
LOGIT_GRADIENTS = 2  # the gradient of the logits, and the probabilities that it is computed from


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


@dataclass(frozen=True)
class SentByBlock:
    """What a strategy that sends each block's gradients as soon as they are complete needs for a while, in blocks.

    whole: blocks whose parameters are whole, while a rank has shards of the others; None: all stay whole.
    messages: the memory of the gradients in transit, at most.
    """

    whole: float | None
    messages: int


SENT_BY_BLOCK = {
    "zero2": SentByBlock(None, messages=2 * SENT_AND_RECEIVED),  # two in transit
    # The block that computes, the next one, and half of one: gloo gathers into a copy, which is alive half of the time.
    "zero3": SentByBlock(whole=2 + 0.5, messages=1 * SENT_AND_RECEIVED),
    # FSDP2 waits for each gather, so the copy is gone when a block computes; of a reduce_scatter, a shard arrives.
    "fsdp": SentByBlock(whole=2, messages=1),
}


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

    strategy: as for --strategy; also single, fsdp, and ddp, whose gradients stay in its buckets.
    sizes: with tensor and grid, those of a slice.
    batch: examples that a worker computes together; with 1f1b a micro-batch, and `workers` stages.
    """
    if strategy == "1f1b":
        return max(_stage(stage, sizes, batch, workers, micro_batches) for stage in range(workers))
    if strategy in SENT_BY_BLOCK:
        return _sent_by_block(SENT_BY_BLOCK[strategy], sizes, batch, workers)
    values = gradients = sizes.parameters
    shard, states = sizes.parameters / workers, 2 * sizes.parameters
    if strategy == "zero1":
        messages = 2 * (SENT_AND_RECEIVED - 1) * sizes.block  # two are in transit, in the place of their gradients
        end = max(gradients + messages, _gathering(shard, sizes.block))
        return values + states / workers + max(turning_point(sizes, batch), end)
    buckets = gradients if strategy in ("ddp", "overlap") else 0  # exist all the time; other gradients come by and by
    update: float = values + gradients + states + ADAM_TEMPORARIES * sizes.embedding
    if strategy == "overlap":  # at the end of the first step it makes its buckets again, in another order
        update += buckets
    if strategy == "ring":  # all gradients once more as one message, and the chunk that arrives
        update = values + gradients + states + gradients + shard
    return max(values + buckets + states + turning_point(sizes, batch), update)


def turning_point(sizes: Sizes, batch: float) -> float:
    """Return what a step needs beside parameters and optimizer when forward ends and backward begins.

    That is all activations, and the larger of two: what the loss needs, and the first gradients, those of the embedding
    matrix (which is also the model's head) and of the last block's largest matrix.
    """
    first_gradients = sizes.embedding + GRADIENT_COPIES * sizes.matrix
    return sizes.blocks * batch * sizes.kept + max(_loss(sizes, batch), first_gradients)


def _loss(sizes: Sizes, batch: float) -> float:
    return batch * (sizes.loss + LOGIT_GRADIENTS * sizes.logits)


def _gathering(shard: float, largest: float) -> float:
    """Return what ZeRO-1 and 2 need to gather new values: gradients and copies of the shards, and gloo two blocks."""
    return shard + shard + 2 * largest


def _sent_by_block(strategy: SentByBlock, sizes: Sizes, batch: float, workers: int) -> float:
    """Return the peak of ZeRO-2, ZeRO-3 or FSDP2."""
    block, shard = sizes.block, sizes.parameters / workers
    values = sizes.parameters if strategy.whole is None else shard + sizes.root + strategy.whole * block
    stays = values + 2 * shard  # and states
    moments = [stays + turning_point(sizes, batch)]
    for sent in range(sizes.blocks):  # blocks that have been sent when the gradients of the next one are complete
        activations = (sizes.blocks - sent - 1) * batch * sizes.kept
        gradients = sizes.embedding + block + sent * block / workers  # the embedding's is complete last
        messages = min(strategy.messages, SENT_AND_RECEIVED * sent) * block
        moments.append(stays + activations + gradients + messages)
    if strategy.whole is None:
        moments.append(stays + _gathering(shard, max(block, sizes.root)))
    return max(moments)


def _stage(stage: int, sizes: Sizes, batch: float, stages: int, micro_batches: int) -> float:
    """Return the peak of a stage of the schedule 1F1B."""
    blocks = sum(block * stages // sizes.blocks == stage for block in range(sizes.blocks))
    ends = (stage == 0) + (stage == stages - 1)  # the first and the last stage have the embedding matrix
    parameters = blocks * sizes.block + (sizes.embedding if ends else 0)
    alive = min(stages - stage, micro_batches)  # micro-batches between their forward and their backward
    sent = micro_batches * (2 - ends)  # is kept until the end: one direction, or both
    borders = (alive + sent) * batch * sizes.border
    loss = _loss(sizes, batch) if stage == stages - 1 else 0
    computing = alive * blocks * batch * sizes.kept + borders + max(loss, sizes.matrix)
    update = ADAM_TEMPORARIES * (sizes.embedding if ends else sizes.matrix)
    return 4 * parameters + max(computing, update)  # values, gradients and two states


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
