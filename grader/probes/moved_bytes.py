"""Lets reference ranks, which load no file of a student's, really move a tensor: the broker counts what each one sends.

A ring and a star on the first 2, 3, ... workers, one after the other. Used for region 4.2.
"""

from typing import Any

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
    """Pieces go to the right neighbour: first they are added up on their way, then the sums go round."""
    pieces = list(tensor.chunk(workers))
    right, left = (rank + 1) % workers, (rank - 1) % workers
    for add in (True, False):
        first = rank if add else rank + 1
        for step in range(1, workers):
            handle: Any = dist.isend(pieces[(first - step + 1) % workers].clone(), right)
            arrived = torch.empty_like(pieces[0])
            dist.recv(arrived, left)
            handle.wait()
            place = (first - step) % workers
            pieces[place] = pieces[place] + arrived if add else arrived
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
