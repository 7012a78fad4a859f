"""Tokens for engines whose workers compute the same examples together."""

import torch
import torch.distributed as dist
from torch import Tensor


def of_all_workers(tokens: Tensor, world_size: int) -> Tensor:
    """The tokens (B, T) of every worker, in the order of ranks: (B * world_size, T)."""
    everybody = [torch.empty_like(tokens) for _ in range(world_size)]
    dist.all_gather(everybody, tokens)
    return torch.cat(everybody)
