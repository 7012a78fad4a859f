"""A training job small enough to be killed a hundred times: linear regression with a sharded Adam. This code is given.

Every rank has a shard of the parameters and of Adam's moments, as with ZeRO-3. In a step, all ranks gather the
parameters, each computes the gradient of its examples, and each updates its shard with the sum.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from beyond.storage import State

LENGTH = 1003  # parameters; not divisible by 2, 3 or 4
RATE, BETA1, BETA2, EPSILON = 0.05, 0.9, 0.99, 1e-8


class SmallJob:
    """What train() trains. count: examples in the data set; batch_size: examples of all ranks in a step."""

    count, batch_size = 52, 12

    def __init__(self, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(self.count, LENGTH, generator=generator, dtype=torch.float64) / LENGTH**0.5  # (B, L)
        self.targets = torch.randn(self.count, generator=generator, dtype=torch.float64)  # (B)
        self.seed = seed

    def fresh(self) -> State:
        """Return the state of a run that begins: all parameters are zero."""
        length = -(-LENGTH // dist.get_world_size())
        names = ("values", "exp_avg", "exp_avg_sq")
        shards = {name: torch.zeros(length, dtype=torch.float64) for name in names}
        return State(0, shards, dict.fromkeys(names, LENGTH), {"seed": self.seed, "epoch": 0, "position": 0})

    def gather(self, state: State) -> Tensor:
        """Return all parameters, on every rank."""
        shard = state.shards["values"]
        whole = shard.new_empty(len(shard) * dist.get_world_size())
        dist.all_gather_single(whole, shard)
        return whole[:LENGTH]

    def gradient(self, values: Tensor, examples: list[int]) -> Tensor:
        """Return this rank's part of the gradient of the mean loss. It makes no collective, and may raise anything."""
        errors = self.inputs[examples] @ values - self.targets[examples]
        return 2 * self.inputs[examples].T @ errors / self.batch_size

    def update(self, state: State, gradient: Tensor) -> None:
        """Sum the gradients of all ranks, and update this rank's shards by one step of Adam."""
        dist.all_reduce(gradient)
        values, mean, square = (state.shards[name] for name in ("values", "exp_avg", "exp_avg_sq"))
        own = pad(gradient, (0, len(values) * dist.get_world_size() - LENGTH)).chunk(dist.get_world_size())
        state.step += 1
        mean.lerp_(own[dist.get_rank()], 1 - BETA1)
        square.lerp_(own[dist.get_rank()] ** 2, 1 - BETA2)
        scale = (square / (1 - BETA2**state.step)).sqrt() + EPSILON
        values -= RATE / (1 - BETA1**state.step) * mean / scale
