"""Strategies that divide optimizer, gradients or parameters among the workers: FSDP2, DeepSpeed's ZeRO, and our own."""

import math
from collections.abc import Iterable

from benchmark.cost.architecture import BYTES, Weight
from benchmark.cost.programs.program import Instruction, Writer, cut
from benchmark.measure.state_bytes import BUCKET, WHOLE

PREFETCHED = 50_000_000  # elements; stage3_prefetch_bucket_size, DeepSpeed's default
LIVE = 1e9  # elements; stage3_max_live_parameters, DeepSpeed's default: what is more is gathered again in backward
Sent = tuple[str, int]  # a message in transit: its key, its bytes


def padded(weights: Iterable[Weight], workers: int) -> int:
    """Return the bytes of parameters as one flat tensor that divides evenly: beyond/flat_parameters.py."""
    return BYTES * workers * math.ceil(sum(weight.elements for weight in weights) / workers)


def rows(weights: Iterable[Weight], workers: int) -> int:
    """Return the bytes of one worker's part when FSDP2 deals out the rows of each parameter in equal numbers."""
    return sum(BYTES * math.ceil(w.shape[0] / workers) * (w.elements // w.shape[0]) for w in weights)


def backward_by_block(writer: Writer) -> list[tuple[int | None, float, bool]]:
    """Return the pieces of backward in order: the block, seconds until its next gradient, whether it is its last."""
    blocks = [weight.block for weight in writer.ready]
    pieces = zip(blocks, writer.step.backward.values(), strict=True)
    return [(block, seconds, block not in blocks[i + 1 :]) for i, (block, seconds) in enumerate(pieces)]


# ------------------------------------------------------------------------------------- the lessons in beyond/


def own_zero1(writer: Writer) -> list[Instruction]:
    """All gradients leave when backward has ended."""
    writer.forward()
    writer.backward()
    sent: list[Sent] = []
    for block in _send_order(writer):
        _send(writer, block, sent, most=2)
    _receive(writer, sent)
    return _update_and_gather(writer)


def own_zero2(writer: Writer) -> list[Instruction]:
    """A block's gradients leave as soon as they are complete, in a fixed order."""
    writer.forward()
    order, ready = _send_order(writer), set[int | None]()
    sent: list[Sent] = []
    for block, seconds, is_last in backward_by_block(writer):
        writer.compute("backward", seconds)
        if is_last:
            ready.add(block)
        while order and order[0] in ready:
            _send(writer, order.pop(0), sent, most=2)
    writer.compute("backward", writer.step.tail)
    _receive(writer, sent)
    return _update_and_gather(writer)


def own_zero3(writer: Writer) -> list[Instruction]:
    """Parameters of a block are gathered while the block before it computes, forward and backward."""
    last = writer.model.n_blocks - 1
    gathers: dict[int | None, str] = {None: _gather(writer, None), 0: _gather(writer, 0)}
    writer.wait(gathers[None])
    for unit, seconds in writer.step.forward.items():
        if unit.startswith("block"):
            index = int(unit.split()[1])
            writer.wait(gathers[index])
            if index < last:
                gathers[index + 1] = _gather(writer, index + 1)
        writer.compute("forward", seconds)
    sent: list[Sent] = []
    begun = {None, last}  # the last block is still whole, and the root
    gathers = {last: ""}
    for block, seconds, is_last in backward_by_block(writer):
        if block not in begun:
            writer.wait(gathers[block])
        if block is not None and block > 0 and block - 1 not in gathers:
            gathers[block - 1] = _gather(writer, block - 1)
        begun.add(block)
        writer.compute("backward", seconds)
        if is_last:
            _send(writer, block, sent, most=1)
    writer.compute("backward", writer.step.tail)
    _receive(writer, sent)
    writer.call("all_reduce", BYTES)
    writer.update(_shards(writer))
    return writer.instructions


def _send_order(writer: Writer) -> list[int | None]:
    return [*reversed(range(writer.model.n_blocks)), None]


def _gather(writer: Writer, block: int | None) -> str:
    size = padded(writer.model.of_block(block), writer.workers) / writer.workers
    return writer.start("all_gather", size)


def _send(writer: Writer, block: int | None, sent: list[Sent], most: int) -> None:
    """Send a block's gradients; so that at most so many messages are in transit, the oldest one is received before."""
    if len(sent) == most:
        _receive(writer, [sent.pop(0)])
    size = padded(writer.model.of_block(block), writer.workers)
    writer.copy("backward", size)
    sent.append((writer.start("all_to_all", size), size))


def _receive(writer: Writer, sent: list[Sent]) -> None:
    for key, size in sent:
        writer.wait(key)
        writer.copy("communication", size)  # the sum over all workers


def _shards(writer: Writer) -> list[float]:
    """The elements of the two parts of each shard: matrices, and few biases and norms."""
    blocks = (padded(writer.model.of_block(block), writer.workers) for block in _send_order(writer))
    return [size for block in blocks for size in (block / BYTES / writer.workers, 0)]


def _update_and_gather(writer: Writer) -> list[Instruction]:
    order = _send_order(writer)
    writer.call("all_reduce", BYTES)  # the common norm
    writer.update(_shards(writer))
    keys = []
    for block in order:
        size = padded(writer.model.of_block(block), writer.workers) / writer.workers
        writer.copy("communication", size)
        keys.append(writer.start("all_gather", size))
    writer.wait(*keys)
    return writer.instructions


# ------------------------------------------------------------------------------------- FSDP2


def fsdp(writer: Writer) -> list[Instruction]:
    """fully_shard on a CPU: every collective is waited for where it is called, so nothing overlaps.

    A block is gathered once more in backward, one ahead of the block that computes. Its gradients are reduced by a
    whole all_reduce, since gloo has no better reduce_scatter.
    """
    model, workers = writer.model, writer.workers

    def gather(block: int | None) -> None:
        size = rows(model.of_block(block), workers)
        writer.copy("communication", workers * size, passes=2)  # into the message, and out of it
        writer.call("all_gather", size)

    def reduce(block: int | None) -> None:
        size = workers * rows(model.of_block(block), workers)
        writer.copy("communication", size, passes=2)
        writer.call("all_reduce", size)

    gather(None)
    for unit, seconds in writer.step.forward.items():
        if unit.startswith("block"):
            gather(int(unit.split()[1]))
        writer.compute("forward", seconds)
    gathered: set[int | None] = {None}
    for block, seconds, is_last in backward_by_block(writer):
        for ahead in (block, None if block is None else block - 1):
            if ahead is not None and ahead >= 0 and ahead not in gathered:
                gather(ahead)
                gathered.add(ahead)
        writer.compute("backward", seconds)
        if is_last:
            reduce(block)
    writer.compute("backward", writer.step.tail)
    writer.call("all_reduce", BYTES * len(model.weights))  # the norms
    writer.update([rows([weight], workers) / BYTES for weight in model.weights])
    return writer.instructions


# ------------------------------------------------------------------------------------- DeepSpeed


def zero12(writer: Writer) -> list[Instruction]:
    """DeepSpeed's stages 1 and 2: gradients in buckets that are waited for, then the new parameters of all shards."""
    model, workers = writer.model, writer.workers
    writer.forward()
    if writer.cell.strategy.startswith("zero1"):  # after backward, matrices first
        writer.backward()
        order = [w for w in model.weights if len(w.shape) > 1] + [w for w in model.weights if len(w.shape) < 2]
        for bucket in cut(order, BYTES * BUCKET):
            _reduce(writer, sum(weight.bytes for weight in bucket))
    else:
        _backward_in_deepspeed_buckets(writer)
    for _ in range(2):  # overflow, norm
        writer.call("all_reduce", BYTES)
    shares = _groups(model.weights, workers)
    writer.update([share / BYTES for share in shares])
    for share in shares:
        writer.copy("communication", share * workers)
        writer.call("all_gather", share)
    return writer.instructions


def zero3(writer: Writer) -> list[Instruction]:
    """DeepSpeed's stage 3: parameters are gathered ahead in large pieces and stay until their gradients are reduced.

    Parameters of up to 100,000 elements are whole on every worker; each is gathered on its own after the step.
    """
    model, workers = writer.model, writer.workers
    large = [weight for weight in model.weights if weight.elements > WHOLE]
    pieces = [sum(padded([weight], workers) for weight in piece) for piece in cut(large, BYTES * PREFETCHED)]

    def gather() -> None:
        for piece in pieces:
            writer.call("all_gather", piece / workers)
            writer.copy("communication", piece)

    gather()
    writer.forward()
    if sum(pieces) > BYTES * LIVE:
        gather()
    _backward_in_deepspeed_buckets(writer)
    for _ in range(2):
        writer.call("all_reduce", 2 * BYTES)
    writer.update([weight.elements / workers for weight in model.weights])
    for weight in model.weights:
        if weight.elements <= WHOLE:
            writer.call("all_gather", padded([weight], workers) / workers)
    return writer.instructions


def _groups(weights: Iterable[Weight], workers: int) -> list[float]:
    """Bytes of a worker's share of the two parameter groups, which are padded to 2 elements for each worker."""
    matrices = sum(weight.elements for weight in weights if len(weight.shape) > 1)
    rest = sum(weight.elements for weight in weights if len(weight.shape) < 2)
    return [BYTES * 2 * math.ceil(count / (2 * workers)) for count in (matrices, rest) if count]


def _backward_in_deepspeed_buckets(writer: Writer) -> None:
    """A bucket is sent when the next gradient does not fit, and backward waits for it."""
    workers = writer.workers if writer.cell.strategy.startswith("zero3") else 1  # there every gradient is padded
    full = 0
    for weight in writer.ready:
        writer.compute("backward", writer.step.backward[weight.name])
        size = padded([weight], workers)
        if full and full + size > BYTES * BUCKET:
            _reduce(writer, full)
            full = 0
        full += size
    writer.compute("backward", writer.step.tail)
    _reduce(writer, full)


def _reduce(writer: Writer, size: int) -> None:
    writer.copy("communication", size, passes=2)
    writer.call("all_reduce", size)
