"""The size of own_overlap's buckets: literal cases, a step played bucket by bucket, and what ranks must agree on."""

import math

import pytest
import torch
import torch.distributed as dist

from benchmark.engines.bucket_size import Costs, bucket_bytes, measure
from beyond.cost_model import TimedBucket, step_time

MB = 10**6


@pytest.mark.parametrize(
    ("costs", "buckets"),
    [
        (Costs(backward=0.4, message=1e-3, byte=9e-9), 20),  # the network is slower: 0.4 s / 1 ms = 20 squared
        (Costs(backward=0.4, message=4e-3, byte=9e-9), 10),  # a message costs more: fewer of them
        (Costs(backward=0.3, message=1e-3, byte=1e-9), 200),  # backward is slower: (0.3 s - 0.1 s) / 1 ms
        (Costs(backward=0.3, message=1e-3, byte=1e-9, processor=2.5e-4), 20),  # 0.1 s / 0.25 ms = 20 squared
        (Costs(backward=0.4, message=1.0, byte=9e-9), 1),  # more than all bytes: a single one
        (Costs(backward=0.4, message=1e-3, byte=0.0), 1),  # one worker: nothing to hide
    ],
)
def test_the_number_of_buckets_is_what_the_formulas_give(costs, buckets):
    assert bucket_bytes(100 * MB, costs) == 100 * MB / buckets
    assert buckets * bucket_bytes(100 * MB + 1, costs) >= 100 * MB + 1  # together they hold every byte


def exposed(count: int, costs: Costs) -> float:
    """What b.16's model says that a step waits for: gradients come evenly, and a bucket's all_reduce is b.15's ring."""
    buckets = [
        TimedBucket(costs.backward * number / count, costs.message + costs.byte * 93 * MB / count)
        for number in range(1, count + 1)
    ]
    return step_time(0.0, costs.backward, 0.0, buckets).exposed


@pytest.mark.parametrize("message", [1e-3, 1e-2])
@pytest.mark.parametrize("byte", [1e-9, 8e-9])  # 8 ns: an all_reduce of two ranks at 1 Gbit/s
def test_by_the_model_of_b_16_no_other_number_of_buckets_exposes_less(message, byte):
    costs = Costs(backward=0.25, message=message, byte=byte)

    chosen = exposed(round(93 * MB / bucket_bytes(93 * MB, costs)), costs)

    assert chosen <= 1.0001 * min(exposed(count, costs) for count in [*range(1, 50), *range(50, 400, 7)])


@pytest.mark.parametrize(("backward", "network", "message"), [(0.3, 0.1, 1e-3), (0.25, 0.74, 1e-3), (0.4, 0.39, 0.01)])
def test_the_rule_in_beyonds_readme_is_the_best_number_by_the_model_of_b_16(backward, network, message):
    costs = Costs(backward, message, network / (93 * MB))

    rule = max(math.sqrt(backward / message), (backward - network) / message)

    assert exposed(round(rule), costs) <= 1.01 * min(exposed(count, costs) for count in range(1, 400, 3))


def test_ranks_of_unequal_speed_get_the_slowest_ones_costs(monkeypatch):
    slower = torch.tensor([0.5, 0.0, 9.0, 0.0], dtype=torch.float64)

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        if op == dist.ReduceOp.MAX:
            tensor.copy_(torch.maximum(tensor, slower))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    costs = measure(lambda: None, torch.device("cpu"))

    assert (costs.backward, costs.byte) == (0.5, 9.0)
    assert costs.message > 0
