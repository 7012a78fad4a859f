"""Strategies in which every worker has the whole model: only gradients are sent."""

from collections.abc import Sequence

from benchmark.cost.architecture import Weight
from benchmark.cost.programs.program import Instruction, Writer, cut

DDP_FIRST, DDP_BUCKET = 2**20, 25 * 2**20  # bytes; torch.nn.parallel.DistributedDataParallel's defaults
HOROVOD_CYCLE = 1e-3  # seconds; HOROVOD_CYCLE_TIME's default


def single(writer: Writer) -> list[Instruction]:
    writer.forward()
    writer.backward()
    return writer.updated()


def ddp(writer: Writer) -> list[Instruction]:
    """Buckets are sent while backward still computes; gradients lie in the buckets, which are divided in place."""
    writer.forward()
    _backward_in_buckets(writer, ddp_buckets(writer.ready))
    return writer.updated()


def horovod(writer: Writer) -> list[Instruction]:
    """Each cycle of its background thread sends the gradients that have become ready, copied into one message."""
    buckets, left = list[list[Weight]](), 0.0
    for weight in writer.ready:
        if left <= 0:
            buckets, left = [*buckets, []], HOROVOD_CYCLE
        buckets[-1].append(weight)
        left -= writer.step.backward[weight.name]
    writer.forward()
    _backward_in_buckets(writer, buckets)
    writer.copy("communication", writer.model.bytes)
    return writer.updated()


def own_overlap(writer: Writer) -> list[Instruction]:
    """The same with the buckets of beyond/overlap.py, into which gradients are copied."""
    writer.forward()
    _backward_in_buckets(writer, cut(writer.ready, writer.cell.bucket_bytes))
    return writer.updated()


def own_ring(writer: Writer) -> list[Instruction]:
    """All gradients in one ring of send and recv when backward has ended: 2(N-1) rounds of S/N, N-1 of them add."""
    size, workers = writer.model.bytes, writer.workers
    writer.forward()
    writer.backward()
    writer.copy("communication", size)
    writer.call("exchange", size / workers, repeats=2 * (workers - 1))
    writer.copy("communication", size, passes=(workers - 1) / workers + 2)
    return writer.updated()


def zero0(writer: Writer) -> list[Instruction]:
    """DeepSpeed without sharding: all gradients flattened into one message after backward."""
    size = writer.model.bytes
    writer.forward()
    writer.backward()
    writer.copy("communication", size)
    writer.call("all_reduce", size)
    writer.copy("communication", size, passes=2)
    writer.call("all_reduce", 4)  # has any worker's gradient overflown?
    return writer.updated()


def ddp_buckets(order: Sequence[Weight]) -> list[list[Weight]]:
    """DistributedDataParallel's rule: a bucket is closed as soon as it holds its size or more."""
    buckets: list[list[Weight]] = [[]]
    for weight in order:
        buckets[-1].append(weight)
        if sum(member.bytes for member in buckets[-1]) >= (DDP_FIRST if len(buckets) == 1 else DDP_BUCKET):
            buckets.append([])
    return [bucket for bucket in buckets if bucket]


def _backward_in_buckets(writer: Writer, buckets: list[list[Weight]]) -> None:
    """Send a bucket as soon as its last gradient is complete; `buckets` are in the order of backward."""
    keys = []
    for bucket in buckets:
        for weight in bucket:
            writer.compute("backward", writer.step.backward[weight.name])
        size = sum(weight.bytes for weight in bucket)
        writer.copy("backward", size)
        keys.append(writer.start("all_reduce", size))
    writer.compute("backward", writer.step.tail)
    writer.wait(*keys)
