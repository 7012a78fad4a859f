"""Data partitions for data parallel training: every worker trains on a part of the data set that no other worker sees.

Ten examples, sizes [0.5, 0.3, 0.2], seed 1234:

    [1] indices      0 1 2 3 4 5 6 7 8 9
        shuffled     2 8 3 5 6 4 9 0 1 7         the same on every rank: the generator is our own, made from the seed
    [2] counts       5 + 3 + 2 = 10              whole examples; what rounding down leaves over is handed out again
    [3] partitions   2 8 3 5 6 | 4 9 0 | 1 7     cut one after the other: nothing twice, nothing left out
    [4] use(1)                   4 9 0           what rank 1 trains on

The loader of each rank then cuts its partition into batches. Here 9 examples on 2 ranks, 2 examples per rank and step:

    rank 0   8 3 2 5 4       (8 3) (2 5) (4)     (4) is left out: rank 1 has no third batch
    rank 1   6 0 1 7         (6 0) (1 7)

After every batch all ranks average their gradients, and each waits for every other. With a third batch rank 0 would
wait for ever. So all ranks take the same number of batches, as many as the smallest partition fills:

    batches per rank = ceil(floor(examples / world_size) / batch size per worker)

Partitions differ by one example at most, so a rank leaves out at most one batch, and that batch holds one example.
"""

import math
import random
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from common.errors import InputError


class Partition(Dataset):
    """Some of the examples of `data`, seen as a data set of their own: example i is data[index[i]]."""

    def __init__(self, data: Sequence, index: Sequence[int]):
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int):
        """The example (not its number) at place `index` of this partition.

        `index` is a whole number from 0; from len(self) on an IndexError is raised, as by a list. Slices need not work.
        """
        # TODO(cos598d) 2b.2: return the example that stands at this place of the partition (1 line)
        # BEGIN SOLUTION 2b.2
        return self.data[self.index[index]]
        # END SOLUTION 2b.2


class DataPartitioner:
    """Divides a data set at random into partitions of given sizes.

    Args:
        data: anything with len() and [i]; it is neither copied nor changed.
        sizes: the fraction of the data that each partition gets; they add up to 1.
        seed: seed of the shuffle. Equal seeds give equal partitions, on every rank and in every run, whatever else
            drew random numbers before.

    After construction `partitions` is a list with one list of indices for each size. They are consecutive parts of the
    shuffled order. A part may be sorted, and its indices may be whole numbers of numpy. Partition k has
    sizes[k] * len(data) examples, rounded up or down, and the partitions together have len(data). Which of them are
    rounded up: those that would lose most by rounding down, the first ones where several lose the same (the largest
    remainder method, known from sharing out the seats of a parliament).

    Raises ValueError if a size is negative or the sizes do not add up to 1.
    """

    def __init__(self, data: Sequence, sizes: Sequence[float] = [0.7, 0.2, 0.1], seed: int = 1234):
        if any(size < 0 for size in sizes) or abs(sum(sizes) - 1) > 1e-9:
            raise InputError(f"sizes: expected fractions that add up to 1, for example [0.7, 0.2, 0.1]; got {sizes}")
        self.data = data
        self.partitions: list[list[int]] = []
        # [1] list the index of every example and shuffle the list with a random generator of its own, made from seed
        # [2] find how many examples each partition gets: round down, then one more each where most was lost
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
        """Partition number `partition` as a data set, its examples in the order of self.partitions[partition].

        Asking twice gives the same examples twice.
        """
        # TODO(cos598d) 2b.4: make a Partition of the data and the indices found above (1 line)
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
    """This rank's share of a data set: a loader over its partition, and the batch size of one worker.

    Args:
        dataset: anything with len() and [i].
        batch_size: examples in one step of all workers together.
        collate_fn: makes a batch of a list of examples; None: torch's own way.
        rank, world_size: which worker this is, of how many; None: as in the process group that was joined.

    The rule for the tail (drawn above): every rank's loader has ceil(floor(len(dataset) / world_size) / b) batches of
    b = batch_size / world_size examples, the last one possibly shorter. A rank whose partition would fill one more
    batch leaves that batch out. With fewer examples than workers some ranks have none, and so no rank has a batch.

    Raises ValueError if batch_size does not divide by world_size, or if no process group was joined and rank or
    world_size is missing.
    """
    if rank is None or world_size is None:
        if not dist.is_initialized():
            raise InputError("partition_dataset: join the process group first, or give both rank and world_size")
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise InputError(f"rank: expected 0 to {world_size - 1} with {world_size} workers, got {rank}")
    if batch_size < 1 or batch_size % world_size:
        example = max(world_size, batch_size - batch_size % world_size)
        raise InputError(
            f"total batch size {batch_size} does not divide over {world_size} workers; "
            f"use a multiple of {world_size}, for example {example}"
        )
    # [1] divide the total batch size by the number of workers
    # [2] divide the data set into world_size partitions of equal size and take the one of this rank
    # [3] count the batches that every rank can fill, and the examples of this partition that go into them
    # [4] wrap these examples in a DataLoader, in the partition's order or another one each epoch; hand collate_fn on
    # TODO(cos598d) 2b.5: return the loader and the batch size per worker (6 lines)
    # BEGIN SOLUTION 2b.5
    batch_size_per_worker = batch_size // world_size
    partition = DataPartitioner(dataset, [1 / world_size] * world_size).use(rank)
    num_batches = math.ceil(len(dataset) // world_size / batch_size_per_worker)
    kept = range(min(len(partition), num_batches * batch_size_per_worker))
    loader: DataLoader = DataLoader(partition, batch_size_per_worker, sampler=kept, collate_fn=collate_fn)
    return loader, batch_size_per_worker
    # END SOLUTION 2b.5
