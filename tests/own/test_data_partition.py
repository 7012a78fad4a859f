"""The given lines of common/data_partition.py, and its drawings; what its regions compute is graded in tests/task2b."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import data_partition
from common.data_partition import DataPartitioner, partition_dataset
from common.errors import InputError

EXAMPLES = [f"example {i}" for i in range(100)]  # which cannot be mistaken for their index


@pytest.mark.parametrize("sizes", [[0.5, 0.4], [0.5] * 4, [1.5, -0.5], []], ids=str)
def test_sizes_that_are_no_fractions_of_a_whole_are_refused(sizes):
    with pytest.raises(InputError, match="expected fractions that add up to 1"):
        DataPartitioner(range(10), sizes)


def test_the_drawings_of_the_docstring_are_what_the_code_does():
    drawing = " ".join(data_partition.__doc__.split())
    partitions = DataPartitioner(range(10), [0.5, 0.3, 0.2], seed=1234).partitions
    parts = " | ".join(" ".join(map(str, part)) for part in partitions)
    loaders = [partition_dataset(range(9), 4, list, rank=rank, world_size=2)[0] for rank in (0, 1)]
    drawn = [" ".join("(" + " ".join(map(str, batch)) + ")" for batch in loader) for loader in loaders]

    assert f"[3] partitions {parts}" in drawing
    assert f"rank 0 8 3 2 5 4 {drawn[0]}" in drawing
    assert f"rank 1 6 0 1 7 {drawn[1]}" in drawing


NOT_DIVISIBLE = (
    "the total batch size {} is not divisible by the number of workers, {}; use a multiple of {}, for example {}"
)


@pytest.mark.parametrize(("batch", "group", "words"), [
    (50, {"rank": 0, "world_size": 4}, NOT_DIVISIBLE.format(50, 4, 4, 48)),
    (2, {"rank": 0, "world_size": 4}, NOT_DIVISIBLE.format(2, 4, 4, 4)),
    (-8, {"rank": 0, "world_size": 4}, NOT_DIVISIBLE.format(-8, 4, 4, 4)),
    (0, {"rank": 0, "world_size": 2}, NOT_DIVISIBLE.format(0, 2, 2, 2)),
    (8, {"rank": 4, "world_size": 4}, "expected 0 to 3 with 4 workers, got 4"),
    (8, {}, "join the process group first"),
])  # fmt: skip
def test_a_batch_or_a_rank_that_does_not_fit_is_refused(batch, group, words):
    with pytest.raises(ValueError, match=words):
        partition_dataset(EXAMPLES, batch, **group)


def test_rank_and_world_size_are_those_given_or_else_those_of_the_process_group():
    # This group is never used to talk, so that one process is enough.
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        (of_group, own), (of_0, _), (_, third) = (
            partition_dataset(EXAMPLES, 6, list, **given) for given in ({}, {"rank": 0}, {"world_size": 3})
        )
    finally:
        dist.destroy_process_group()

    halves = DataPartitioner(EXAMPLES, [0.5, 0.5])
    assert [example for batch in of_group for example in batch] == list(halves.use(1))
    assert [example for batch in of_0 for example in batch] == list(halves.use(0))
    assert (own, third) == (3, 2)
