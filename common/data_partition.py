"""Data partitions for data parallel training: every worker trains on a part of the data set that no other worker uses.

Ten examples, sizes [0.5, 0.3, 0.2], seed 1234:

    [1] indices      0 1 2 3 4 5 6 7 8 9
        shuffled     2 8 3 5 6 4 9 0 1 7         the same on every rank: a separate generator, made from the seed
    [2] counts       5 + 3 + 2 = 10              whole examples; the remaining ones are distributed one by one
    [3] partitions   2 8 3 5 6 | 4 9 0 | 1 7     consecutive parts: no example twice, none left out
    [4] use(1)                   4 9 0           what rank 1 trains on

The counts of [2] when the sizes do not divide evenly, for 11 examples and sizes [0.7, 0.2, 0.1]:

    size * 11        7.7  2.2  1.1
    rounded down     7    2    1                 10 examples: one remains
    counts           8    2    1                 it goes to the partition that lost the most, .7

The loader of each rank then cuts its partition into batches. Here 9 examples on 2 ranks, 2 examples per rank and step:

    rank 0   8 3 2 5 4       (8 3) (2 5) (4)     (4) is left out: rank 1 has no third batch
    rank 1   6 0 1 7         (6 0) (1 7)

After every batch, all ranks average their gradients, and each waits for all the others. With a third batch, rank 0
would wait forever. So all ranks take the same number of batches, as many as the smallest partition fills:

    batches per rank = ceil(floor(examples / world_size) / batch size per worker)

Partitions differ by at most one example. So a rank leaves out at most one batch, which holds one example.
"""

import math
import random
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from common.errors import InputError


class Partition(Dataset):
    """A subset of `data` as a data set: example i is data[index[i]]."""

    def __init__(self, data: Sequence, index: Sequence[int]):
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int):
        """Return the example (not its number) at `index` of this partition.

        `index` is an integer from 0. From len(self) on, raise an IndexError, as a list does. Slices are not needed.
        """
        # TODO(cos598d) 2b.2: return the example at this index of the partition (1 line)
        # BEGIN SOLUTION 2b.2
        return self.data[self.index[index]]
        # END SOLUTION 2b.2


class DataPartitioner:
    """Divides a data set randomly into partitions of given sizes.

    Args:
        data: anything with len() and [i]; it is neither copied nor changed.
        sizes: the fraction of the data that each partition gets; they add up to 1.
        seed: seed of the shuffle. Equal seeds give equal partitions on every rank and in every run, no matter which
            random numbers the program has drawn before.

    After construction, `partitions` is a list with one list of indices for each size. They are consecutive parts of
    the shuffled order. You may sort a part, and its indices may be numpy integers. Partition k has
    sizes[k] * len(data) examples, rounded up or down, and the partitions together have len(data). Those that would
    lose the largest fraction of an example by rounding down are rounded up; on a tie, the earlier ones. (This is the
    largest remainder method.)

    Raises ValueError if a size is negative or the sizes do not add up to 1.
    """

    def __init__(self, data: Sequence, sizes: Sequence[float] = [0.7, 0.2, 0.1], seed: int = 1234):
        if any(size < 0 for size in sizes) or abs(sum(sizes) - 1) > 1e-9:
            raise InputError(f"sizes: expected fractions that add up to 1, for example [0.7, 0.2, 0.1]; got {sizes}")
        self.data = data
        self.partitions: list[list[int]] = []
        # [1] list the index of every example and shuffle the list with a separate random generator, made from seed
        # [2] count each partition: size * len(data), rounded down, and one more where rounding lost the most
        # [3] cut the list into consecutive parts of these lengths and keep them in self.partitions
        # TODO(cos598d) 2b.3: fill self.partitions (11 lines)
        # BEGIN SOLUTION 2b.3
        indices = list(range(len(data)))
        random.Random(seed).shuffle(indices)
        shares = [size * len(data) for size in sizes]
        counts = [math.floor(share) for share in shares]
        most_lost_first = sorted(range(len(sizes)), key=lambda k: counts[k] - shares[k])
        for k in most_lost_first[: len(data) - sum(counts)]:
            counts[k] += 1
        start = 0
        for count in counts:
            self.partitions.append(indices[start : start + count])
            start += count
        # END SOLUTION 2b.3

    def use(self, partition: int) -> Partition:
        """Return partition number `partition` as a data set, in the order of self.partitions[partition].

        A second call returns the same examples again.
        """
        # TODO(cos598d) 2b.4: create a Partition from the data and the indices computed above (1 line)
        # BEGIN SOLUTION 2b.4
        return Partition(self.data, self.partitions[partition])
        # END SOLUTION 2b.4


def partition_dataset(
    dataset: Sequence,
    batch_size: int = 128,
    collate_fn: Callable | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> tuple[DataLoader, int]:
    """Return a loader over this rank's partition of a data set, and the batch size of one worker.

    Args:
        dataset: anything with len() and [i].
        batch_size: examples in one step of all workers together.
        collate_fn: makes a batch from a list of examples; None: torch's default.
        rank, world_size: this worker and the number of workers; None: those of the process group.

    The rule for the tail (see the drawing above): every rank's loader has ceil(floor(len(dataset) / world_size) / b)
    batches of b = batch_size / world_size examples, the last one possibly shorter. A rank whose partition would
    fill one more batch leaves that batch out. With fewer examples than workers, some ranks have none, so no rank has a
    batch.

    Raises ValueError if batch_size is not divisible by world_size, or if there is no process group and rank or
    world_size is missing.
    """
    if rank is None or world_size is None:
        if not dist.is_initialized():
            raise InputError("partition_dataset: join the process group first, or pass both rank and world_size")
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise InputError(f"rank: expected 0 to {world_size - 1} with {world_size} workers, got {rank}")
    if batch_size < 1 or batch_size % world_size:
        example = max(world_size, batch_size - batch_size % world_size)
        raise InputError(
            f"the total batch size {batch_size} is not divisible by the number of workers, {world_size}; "
            f"use a multiple of {world_size}, for example {example}"
        )
    # [1] divide the total batch size by the number of workers
    # [2] divide the data set into world_size partitions of equal size and take the one of this rank
    # [3] count the batches that every rank can fill, and how many examples of this partition they use
    # [4] wrap these examples in a DataLoader, in the partition's order or in a new order in each epoch; pass collate_fn
    # TODO(cos598d) 2b.5: return the loader and the batch size per worker (6 lines)
    # BEGIN SOLUTION 2b.5
    batch_size_per_worker = batch_size // world_size
    partition = DataPartitioner(dataset, [1 / world_size] * world_size).use(rank)
    num_batches = math.ceil(len(dataset) // world_size / batch_size_per_worker)
    kept = range(min(len(partition), num_batches * batch_size_per_worker))
    loader: DataLoader = DataLoader(partition, batch_size_per_worker, sampler=kept, collate_fn=collate_fn)
    return loader, batch_size_per_worker
    # END SOLUTION 2b.5
