"""Lets reference ranks, which load no file of a student's, really move a tensor: the broker counts what each one sends.

A ring and a star on the first 2, 3, ... workers, one after the other. Used for region 4.2.
"""

import torch
import torch.distributed as dist

from grader.inside.context import Context


def moves(context: Context) -> list[torch.Tensor]:
    """The sum over the first n workers, by a ring and by a star, for n from 2 to all; [] where this rank has no part.

    Argument: mine, this rank's numbers; their count can be divided by every n. An event precedes each exchange.
    """
    mine: torch.Tensor = context.arguments["mine"]
    context.join()
    sums = []
    for workers in range(2, context.world_size + 1):
        if context.rank >= workers:
            continue
        for name, exchange in (("ring", _ring), ("star", _star)):
            context.event(name, workers=workers)
            sums.append(exchange(mine.clone(), context.rank, workers))
    return sums


def _ring(tensor: torch.Tensor, rank: int, workers: int) -> torch.Tensor:
    """Each piece goes round alone, twice but for two hops: it is added up on its way, then its sum replaces the others.

    Not all pieces at the same time, as in a ring that is to be fast: that is the lesson of region b.1.
    """
    pieces, right, left = list(tensor.chunk(workers)), (rank + 1) % workers, (rank - 1) % workers
    for number, piece in enumerate(pieces):
        for hop in range(2 * (workers - 1)):
            if (number + hop) % workers == rank:
                dist.send(piece, right)
            elif (number + hop) % workers == left:
                arrived = torch.empty_like(piece)
                dist.recv(arrived, left)
                piece.copy_(piece + arrived if hop < workers - 1 else arrived)
    return torch.cat(pieces)


def _star(tensor: torch.Tensor, rank: int, workers: int) -> torch.Tensor:
    """All others send to rank 0, which adds up and sends the sum back to each."""
    if rank:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return tensor
    for other in range(1, workers):
        arrived = torch.empty_like(tensor)
        dist.recv(arrived, other)
        tensor += arrived
    for other in range(1, workers):
        dist.send(tensor, other)
    return tensor
