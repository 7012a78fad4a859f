"""The order of the examples: the same in the whole assignment, so that the tasks can be compared."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class ShuffledEachEpoch(Sampler[int]):
    """A sampler with a new order of all examples each time you iterate over it: epoch 0, then 1, ...

    The order of epoch e is torch.randperm with the seed `seed + e`. torch's DistributedSampler
    uses the same order and divides it among its replicas. So the i-th batch of one worker holds the same examples as
    the i-th batches of n workers together.
    """

    def __init__(self, dataset: Sized, seed: int):
        self.dataset = dataset
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        self.epoch += 1
        return iter(torch.randperm(len(self.dataset), generator=generator).tolist())
