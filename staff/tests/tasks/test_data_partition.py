"""What common/data_partition.py refuses; what its regions compute is graded in tests/task2b."""

import pytest

from common.data_partition import DataPartitioner, partition_dataset


@pytest.mark.parametrize("sizes", [[0.5, 0.4], [0.5] * 4, [1.5, -0.5], []], ids=str)
def test_sizes_that_are_no_fractions_of_a_whole_are_refused(sizes):
    with pytest.raises(ValueError, match="expected fractions that add up to 1"):
        DataPartitioner(range(10), sizes)


@pytest.mark.parametrize(("batch", "group", "words"), [
    *[(batch, {"rank": 0, "world_size": 4}, f"{batch} is not divisible by .* 4; use .* for example {advice}")
      for batch, advice in ((50, 48), (2, 4), (-8, 4), (0, 4))],
    (8, {"rank": 4, "world_size": 4}, "expected 0 to 3 with 4 workers, got 4"),
    (8, {}, "join the process group first"),
    (8, {"rank": 0}, "join the process group first"),
])  # fmt: skip
def test_a_batch_or_a_rank_that_does_not_fit_is_refused(batch, group, words):
    with pytest.raises(ValueError, match=words):
        partition_dataset(range(100), batch, **group)
