"""The state of ZeRO's shards, saved and loaded with the survive lesson; with one rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from beyond.checkpoint import load_shards, save_shards
from beyond.sharded_optimizer import ShardedOptimizer
from common.errors import InputError


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def training(width=3):
    """A model and its sharded optimizer."""
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    return model, ShardedOptimizer(model, list(model), partial(torch.optim.AdamW, lr=0.1), weight_decay=0.1)


def step(model, sharded):
    model(torch.ones(2, model[0].in_features)).square().sum().backward()
    sharded.finish()
    sharded.step()
    sharded.zero_grad()


def test_a_run_continues_from_saved_shards_with_their_values_and_moments(tmp_path):
    saved, loaded = training(), training()
    step(*saved)
    save_shards(tmp_path, saved[1])
    load_shards(tmp_path, loaded[1])
    step(*saved)
    step(*loaded)

    for one, other in zip(saved[0].parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_that_is_missing_damaged_or_of_another_model_is_one_clear_line(tmp_path):
    model, sharded = training()
    with pytest.raises(InputError, match="found none"):
        load_shards(tmp_path, sharded)
    step(model, sharded)
    save_shards(tmp_path, sharded)
    with pytest.raises(InputError, match="differ from this model's"):
        load_shards(tmp_path, training(width=4)[1])
    (shard,) = tmp_path.glob("step*/shard0")
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(InputError, match="cannot read it"):
        load_shards(tmp_path, sharded)
    with pytest.raises(InputError, match="cannot write it"):
        save_shards(shard, sharded)
