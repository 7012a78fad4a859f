"""Our own tests of common/data_partition.py: properties that hold for any data set, any sizes and any seed."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import data_partition
from common.data_partition import DataPartitioner, Partition, partition_dataset
from common.errors import InputError

MANY_SIZES = [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [1 / 3] * 3, [0.1] * 10, [1 / 7] * 7, [0.0, 1.0], [0.29, 0.71]]
MANY_LENGTHS = [0, 1, 2, 3, 5, 9, 10, 29, 100, 1001]


def examples(count: int) -> list[str]:
    """Examples that cannot be mistaken for their index."""
    return [f"example {i}" for i in range(count)]


def batches_of_all_ranks(count: int, total_batch_size: int, world_size: int) -> list[list[list[str]]]:
    loaders = [
        partition_dataset(examples(count), total_batch_size, list, rank=rank, world_size=world_size)[0]
        for rank in range(world_size)
    ]
    return [list(loader) for loader in loaders]


def test_a_partition_gives_the_examples_at_its_indices():
    partition = Partition(["a", "b", "c", "d"], [3, 1])

    assert list(partition) == ["d", "b"]
    assert len(partition) == 2


@pytest.mark.parametrize("sizes", MANY_SIZES, ids=str)
@pytest.mark.parametrize("count", MANY_LENGTHS)
def test_every_example_is_in_exactly_one_partition(count, sizes):
    partitioner = DataPartitioner(examples(count), sizes, seed=count)

    seen = [example for k in range(len(sizes)) for example in partitioner.use(k)]

    assert sorted(seen) == sorted(examples(count))
    assert len(partitioner.partitions) == len(sizes)


@pytest.mark.parametrize("sizes", MANY_SIZES, ids=str)
@pytest.mark.parametrize("count", MANY_LENGTHS)
def test_a_partition_is_less_than_one_example_away_from_its_size(count, sizes):
    counts = [len(part) for part in DataPartitioner(examples(count), sizes).partitions]

    for size, part in zip(sizes, counts, strict=True):
        assert abs(part - size * count) < 1


def test_sizes_and_seeds_drawn_at_random_keep_every_example_once():
    draw = random.Random(0)
    for _ in range(300):
        weights = [draw.random() for _ in range(draw.randint(1, 9))]
        sizes = [weight / sum(weights) for weight in weights]
        count = draw.randint(0, 200)

        partitions = DataPartitioner(range(count), sizes, seed=draw.randrange(10**6)).partitions

        assert sorted(index for part in partitions for index in part) == list(range(count))
        assert all(abs(len(part) - size * count) < 1 for part, size in zip(partitions, sizes, strict=True))


@pytest.mark.parametrize(
    "count, sizes, expected",
    [
        (10, [0.7, 0.2, 0.1], [7, 2, 1]),
        (11, [0.7, 0.2, 0.1], [8, 2, 1]),  # 7.7, 2.2, 1.1: the first lost most
        (9, [0.7, 0.2, 0.1], [6, 2, 1]),  # 6.3, 1.8, 0.9: the last lost most, then the second
        (6, [0.25] * 4, [2, 2, 1, 1]),  # all lost the same: the first ones
        (100, [0.29, 0.71], [29, 71]),  # 0.29 * 100 is 28.999999999999996 in floating point
        (2, [0.25] * 4, [1, 1, 0, 0]),
    ],
)
def test_what_rounding_leaves_over_goes_where_most_was_lost(count, sizes, expected):
    partitions = DataPartitioner(range(count), sizes).partitions

    assert [len(part) for part in partitions] == expected


def test_equal_seeds_give_equal_partitions_whatever_drew_random_numbers_before():
    random.seed(1)
    first = DataPartitioner(range(100), [0.5, 0.5], seed=7).partitions
    random.seed(2)
    second = DataPartitioner(range(100), [0.5, 0.5], seed=7).partitions

    assert first == second


def test_another_seed_gives_other_partitions():
    assert (
        DataPartitioner(range(100), [1.0], seed=1).partitions != DataPartitioner(range(100), [1.0], seed=2).partitions
    )


def test_the_examples_are_shuffled():
    (indices,) = DataPartitioner(range(100), [1.0]).partitions

    assert indices != sorted(indices)


def test_the_global_random_generator_is_left_alone():
    random.seed(3)
    expected = random.random()
    random.seed(3)

    DataPartitioner(range(100), [0.5, 0.5])

    assert random.random() == expected


def test_the_data_are_not_reordered():
    data = examples(20)

    DataPartitioner(data, [0.5, 0.5])

    assert data == examples(20)


def test_asking_twice_gives_the_same_examples():
    partitioner = DataPartitioner(examples(20), [0.5, 0.5])

    assert list(partitioner.use(1)) == list(partitioner.use(1))


@pytest.mark.parametrize("sizes", [[0.5, 0.4], [0.5] * 4, [1.5, -0.5], []], ids=str)
def test_sizes_that_are_no_fractions_of_a_whole_are_refused(sizes):
    with pytest.raises(InputError, match="expected fractions that add up to 1"):
        DataPartitioner(range(10), sizes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_size_per_worker", [1, 2, 5])
def test_all_ranks_have_the_same_number_of_batches_and_leave_out_one_example_at_most(world_size, batch_size_per_worker):
    for count in range(45):
        ranks = batches_of_all_ranks(count, batch_size_per_worker * world_size, world_size)

        kept = [example for batches in ranks for batch in batches for example in batch]
        expected = math.ceil(count // world_size / batch_size_per_worker)
        assert [len(batches) for batches in ranks] == [expected] * world_size
        assert len(set(kept)) == len(kept)
        for rank, batches in enumerate(ranks):
            own = len(DataPartitioner(range(count), [1 / world_size] * world_size).partitions[rank])
            left_out = own - sum(map(len, batches))
            assert left_out in (0, 1)
            assert left_out == 0 or own == expected * batch_size_per_worker + 1


def test_only_the_last_batch_may_be_short():
    for batches in batches_of_all_ranks(count=23, total_batch_size=8, world_size=2):
        assert [len(batch) for batch in batches[:-1]] == [4, 4]
        assert 1 <= len(batches[-1]) <= 4


def test_fewer_examples_than_workers_give_every_rank_no_batch():
    assert batches_of_all_ranks(count=3, total_batch_size=4, world_size=4) == [[], [], [], []]


def test_one_worker_sees_everything():
    (batches,) = batches_of_all_ranks(count=10, total_batch_size=4, world_size=1)

    assert sorted(example for batch in batches for example in batch) == sorted(examples(10))


def test_the_drawings_of_the_docstring_are_what_the_code_does():
    drawing = " ".join(data_partition.__doc__.split())
    partitions = DataPartitioner(range(10), [0.5, 0.3, 0.2], seed=1234).partitions
    parts = " | ".join(" ".join(map(str, part)) for part in partitions)
    loaders = [partition_dataset(range(9), 4, list, rank=rank, world_size=2)[0] for rank in (0, 1)]
    drawn = [" ".join("(" + " ".join(map(str, batch)) + ")" for batch in loader) for loader in loaders]

    assert f"[3] partitions {parts}" in drawing
    assert f"rank 0 8 3 2 5 4 {drawn[0]}" in drawing
    assert f"rank 1 6 0 1 7 {drawn[1]}" in drawing


def test_the_batch_size_per_worker_comes_back():
    loader, per_worker = partition_dataset(examples(100), 32, rank=1, world_size=4)

    assert per_worker == 8
    assert len(next(iter(loader))) == 8


def test_collate_fn_makes_the_batches():
    loader, _ = partition_dataset([1, 2, 3, 4], 2, sum, rank=0, world_size=1)

    assert sum(loader) == 10


def test_tensors_are_stacked_without_a_collate_fn():
    loader, _ = partition_dataset(torch.arange(12).reshape(4, 3), 4, rank=0, world_size=2)

    assert next(iter(loader)).shape == (2, 3)


@pytest.mark.parametrize("total, workers, example", [(50, 4, 48), (2, 4, 4), (0, 2, 2), (-8, 4, 4)])
def test_a_total_batch_size_that_does_not_divide_is_refused_with_one_that_does(total, workers, example):
    expected = (
        f"the total batch size {total} is not divisible by the number of workers, {workers}; "
        f"use a multiple of {workers}, for example {example}"
    )

    with pytest.raises(ValueError, match=expected):
        partition_dataset(examples(100), total, rank=0, world_size=workers)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(InputError, match="expected 0 to 3 with 4 workers, got 4"):
        partition_dataset(examples(100), 8, rank=4, world_size=4)


def test_without_a_process_group_rank_and_world_size_must_be_given():
    with pytest.raises(InputError, match="join the process group first"):
        partition_dataset(examples(100), 8)


@pytest.fixture
def rank_1_of_2():
    """A process group that is never used to talk, so that one process is enough."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_1_of_2")
def test_rank_and_world_size_come_from_the_process_group():
    loader, per_worker = partition_dataset(examples(6), 2, list)

    expected = DataPartitioner(examples(6), [0.5, 0.5]).use(1)
    assert per_worker == 1
    assert [batch[0] for batch in loader] == list(expected)


@pytest.mark.usefixtures("rank_1_of_2")
def test_a_given_world_size_goes_before_the_process_groups():
    _, per_worker = partition_dataset(examples(6), 6, world_size=3)

    assert per_worker == 2


@pytest.mark.usefixtures("rank_1_of_2")
def test_a_given_rank_goes_before_the_process_groups():
    loader, _ = partition_dataset(examples(6), 2, list, rank=0)

    assert [batch[0] for batch in loader] == list(DataPartitioner(examples(6), [0.5, 0.5]).use(0))
