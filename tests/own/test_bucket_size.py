"""The size of own_overlap's buckets: literal cases, a step played bucket by bucket, and what ranks must agree on."""

import math
import os
import subprocess
import sys

import pytest

from benchmark.engines.bucket_size import Costs, bucket_bytes
from beyond.cost_model import TimedBucket, step_time
from common.paths import ROOT

pytestmark = pytest.mark.medium

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


def test_the_buckets_together_hold_every_byte():
    size = bucket_bytes(100 * MB + 1, Costs(backward=0.4, message=1e-3, byte=9e-9))

    assert 20 * size >= 100 * MB + 1


def exposed(count: int, costs: Costs) -> float:
    """What b.16's model says that a step waits for: gradients come evenly, and a bucket's all_reduce is b.15's ring."""
    buckets = [
        TimedBucket(costs.backward * number / count, costs.message + costs.byte * 93 * MB / count)
        for number in range(1, count + 1)
    ]
    return step_time(0.0, costs.backward, 0.0, buckets).exposed


@pytest.mark.parametrize("message", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("byte", [1e-9, 5e-9, 8e-9, 1.2e-8])  # 8 ns: an all_reduce of two ranks at 1 Gbit/s
def test_by_the_model_of_b_16_no_other_number_of_buckets_exposes_less(message, byte):
    costs = Costs(backward=0.25, message=message, byte=byte)

    chosen = exposed(round(93 * MB / bucket_bytes(93 * MB, costs)), costs)

    assert chosen <= 1.0001 * min(exposed(count, costs) for count in range(1, 1000))


@pytest.mark.parametrize(("backward", "network", "message"), [(0.3, 0.1, 1e-3), (0.25, 0.74, 1e-3), (0.4, 0.39, 0.01)])
def test_the_rule_in_beyonds_readme_is_the_best_number_by_the_model_of_b_16(backward, network, message):
    costs = Costs(backward, message, network / (93 * MB))

    rule = max(math.sqrt(backward / message), (backward - network) / message)

    assert exposed(round(rule), costs) <= 1.01 * min(exposed(count, costs) for count in range(1, 1000))


def test_at_1_gbit_a_bucket_is_megabytes_and_neither_ddps_25_nor_a_parameter():
    size = bucket_bytes(93 * MB, Costs(backward=0.25, message=5e-4, byte=8e-9))  # gpt2-24m, two nodes

    assert 2 * MB < size < 8 * MB


RANK = """
import sys
import time
import torch
import torch.distributed as dist
from benchmark.engines.bucket_size import measure

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
print(measure(lambda: time.sleep(0.02 * rank), torch.device("cpu")))
dist.destroy_process_group()
"""


def test_ranks_of_unequal_speed_get_the_slowest_ones_costs(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]

    assert said[0] == said[1] != ""
    assert float(said[0].split()[1]) >= 20
