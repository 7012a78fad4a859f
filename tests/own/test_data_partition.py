"""The given lines of common/data_partition.py, and its drawings; what its regions compute is graded in tests/task2b."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import data_partition
from common.data_partition import DataPartitioner, Partition, partition_dataset
from common.errors import InputError


def examples(count: int) -> list[str]:
    """Examples that cannot be mistaken for their index."""
    return [f"example {i}" for i in range(count)]


def batches_of_all_ranks(count: int, total_batch_size: int, world_size: int) -> list[list[list[str]]]:
    loaders = [
        partition_dataset(examples(count), total_batch_size, list, rank=rank, world_size=world_size)[0]
        for rank in range(world_size)
    ]
    return [list(loader) for loader in loaders]


def test_a_partition_is_as_long_as_its_list_of_indices():
    assert len(Partition(["a", "b", "c", "d"], [3, 1])) == 2


@pytest.mark.parametrize("sizes", [[0.5, 0.4], [0.5] * 4, [1.5, -0.5], []], ids=str)
def test_sizes_that_are_no_fractions_of_a_whole_are_refused(sizes):
    with pytest.raises(InputError, match="expected fractions that add up to 1"):
        DataPartitioner(range(10), sizes)


def test_fewer_examples_than_workers_give_every_rank_no_batch():
    assert batches_of_all_ranks(count=3, total_batch_size=4, world_size=4) == [[], [], [], []]


def test_the_drawings_of_the_docstring_are_what_the_code_does():
    drawing = " ".join(data_partition.__doc__.split())
    partitions = DataPartitioner(range(10), [0.5, 0.3, 0.2], seed=1234).partitions
    parts = " | ".join(" ".join(map(str, part)) for part in partitions)
    loaders = [partition_dataset(range(9), 4, list, rank=rank, world_size=2)[0] for rank in (0, 1)]
    drawn = [" ".join("(" + " ".join(map(str, batch)) + ")" for batch in loader) for loader in loaders]

    assert f"[3] partitions {parts}" in drawing
    assert f"rank 0 8 3 2 5 4 {drawn[0]}" in drawing
    assert f"rank 1 6 0 1 7 {drawn[1]}" in drawing


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
