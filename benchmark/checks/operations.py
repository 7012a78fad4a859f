"""Seconds and bytes of operations on a link, by the instrument of transfers.py."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmark.checks import transfers
from common.config import RunConfig


def operations(config: RunConfig, size: int) -> dict[str, Callable[[], object]]:
    """Return the operations of a rank that hands in `size` bytes; message: from rank 0 to rank 1."""
    rank, n = config.rank, config.world_size
    tensor = torch.ones(size // 4)
    # Made before: the first touch of so much memory takes time that is not the network's.
    room = [torch.ones_like(tensor) for _ in range(n)] if rank == 0 else None
    part = torch.ones(size // 4 // n)

    def message() -> None:
        if rank < 2:
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)

    def gather_and_scatter() -> None:  # as task 2a moves one gradient; the mean itself costs no byte
        dist.gather(tensor, room, dst=0)
        dist.scatter(tensor, room, src=0)

    return {
        **transfers.operations(size, n, rank, everybody()),
        "message": message,
        "gather": lambda: dist.gather(tensor, room, dst=0),
        "scatter": lambda: dist.scatter(tensor, room, src=0),
        "gather + scatter": gather_and_scatter,
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, tensor),
    }


def time_operations(config: RunConfig, names: list[str], size: int, seconds: float = 0.0) -> dict[str, list[float]]:
    """Return, of each operation, the seconds until the slowest rank is done, and the bytes out of this interface.

    It repeats an operation for about so many seconds, at least three times, and returns the shortest time, since other
    programs only add to it. Small ones follow themselves a few times; `hop` is half of there and back.
    """
    available, figures = operations(config, size), {}

    def with_all_bytes(operation: Callable[[], object]) -> None:
        operation()
        dist.barrier()  # it ends when the slowest rank has ended it, and the last bytes have left

    for name in names:
        call = available[name] if size <= transfers.SMALL else partial(with_all_bytes, available[name])
        took, _, sent = transfers.measure_one(call, 1 + (name == "hop"), size, seconds, True, everybody())
        figures[name] = [took, sent or 0.0]
    return figures


def everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
