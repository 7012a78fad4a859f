"""Our own tests of GPT-2 on several devices: plain, model parallel and piped are the same model."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.errors import InputError
from pipeline.model_parallel import GPT2LMHeadModelParallel
from tests.own.pipeline_stages import no_worker_is_left

pytestmark = pytest.mark.medium

__all__ = ["no_worker_is_left"]  # a fixture for every test here


@pytest.fixture(scope="module")
def gpt2_config() -> GPT2Config:
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2Config(**sizes, **special, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)


def padded(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0  # padding on the left
    mask[2, 7:] = 0  # and on the right
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2"]])
def test_plain_model_parallel_and_piped_gpt2_agree(gpt2_config, attention, with_mask, devices):
    config = copy.deepcopy(gpt2_config)
    config._attn_implementation = attention
    torch.manual_seed(0)
    plain, parallel = GPT2LMHeadModel(config), GPT2LMHeadModelParallel(config)
    parallel.load_state_dict(plain.state_dict())
    parallel.parallelize(devices)
    piped = GPT2LMHeadModelParallel(config)
    piped.load_state_dict(plain.state_dict())
    piped.parallelize(devices)
    piped._prepare_pipeline_parallel(2)
    tokens = torch.randint(0, 50, (5, 10))
    inputs = padded(tokens) if with_mask else {}

    losses = []
    for model in (plain, parallel, piped):
        output = model(tokens, labels=tokens, **inputs)
        output.loss.backward()
        losses.append(output.loss.item())

    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert len(piped.transformer.h_pp.partitions) == len(devices)
    for model in (parallel, piped):
        for (name, wanted), (other, parameter) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert name == other
            torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("use_cache", [None, False])
def test_position_ids_that_start_again_mean_what_they_mean_in_transformers(gpt2_config, use_cache):
    plain, piped = GPT2LMHeadModel(gpt2_config), GPT2LMHeadModelParallel(gpt2_config)
    piped.load_state_dict(plain.state_dict())
    piped.parallelize(["cpu:0", "cpu:1"])
    piped._prepare_pipeline_parallel(2)
    tokens, positions = torch.randint(0, 50, (3, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]]).repeat(3, 1)

    wanted = plain(tokens, labels=tokens, position_ids=positions, use_cache=use_cache).loss
    got = piped(tokens, labels=tokens, position_ids=positions, use_cache=use_cache).loss

    assert got.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_a_piped_gpt2_is_saved_with_each_block_once_and_transformers_reads_it(gpt2_config, tmp_path):
    piped = GPT2LMHeadModelParallel(gpt2_config)
    piped._prepare_pipeline_parallel(2)
    tokens = torch.randint(0, 50, (3, 6))

    piped.save_pretrained(tmp_path)
    plain = GPT2LMHeadModel.from_pretrained(tmp_path)

    assert piped.state_dict().keys() == plain.state_dict().keys()
    assert piped.lm_head.weight is piped.transformer.wte.weight
    torch.testing.assert_close(piped(tokens).logits, plain(tokens).logits)


def test_the_blocks_are_spread_evenly_and_in_order(gpt2_config):
    model = GPT2LMHeadModelParallel(gpt2_config)

    model.parallelize(["cpu:0", "cpu:1", "cpu:2"])

    assert [device.index for device in model.transformer.block_devices] == [0, 0, 1, 2]


@pytest.mark.parametrize("devices", [[], ["cpu:0"] * 5])
def test_more_devices_than_blocks_or_none_are_refused(gpt2_config, devices):
    with pytest.raises(InputError, match="expected 1 to 4 devices for 4 blocks"):
        GPT2LMHeadModelParallel(gpt2_config).parallelize(devices)


def test_dropout_in_a_piped_gpt2_repeats_with_its_seed(gpt2_config):
    config = copy.deepcopy(gpt2_config)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.2
    model = GPT2LMHeadModelParallel(config).train()
    model.parallelize(["cpu:0", "cpu:1"])
    model._prepare_pipeline_parallel(1)
    tokens = torch.randint(0, 50, (6, 8))
    losses = []

    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append(model(tokens, labels=tokens).loss.item())

    assert losses[0] == losses[1] != losses[2]
