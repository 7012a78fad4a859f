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


TOKENS = torch.randint(0, 50, (5, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS)
MASK[0, :4] = 0  # padding on the left
MASK[2, 7:] = 0  # and on the right
PADDED = {"attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}


def test_with_eager_attention_a_mask_is_added_in_the_plain_model_and_in_the_piped_one(gpt2_config):
    """The graders of the pipeline compare the models with the default attention."""
    config = copy.deepcopy(gpt2_config)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    plain, parallel, piped = GPT2LMHeadModel(config), GPT2LMHeadModelParallel(config), GPT2LMHeadModelParallel(config)
    for model in (parallel, piped):
        model.load_state_dict(plain.state_dict())
        model.parallelize(["cpu:0", "cpu:1"])
    piped._prepare_pipeline_parallel(2)

    losses = []
    for model in (plain, parallel, piped):
        output = model(TOKENS, labels=TOKENS, **PADDED)
        output.loss.backward()
        losses.append(output.loss.item())

    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    for model in (parallel, piped):
        for (name, wanted), (other, parameter) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert name == other
            torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_piped_gpt2_is_saved_with_each_block_once_and_transformers_reads_it(gpt2_config, tmp_path):
    piped = GPT2LMHeadModelParallel(gpt2_config)
    piped._prepare_pipeline_parallel(2)

    piped.save_pretrained(tmp_path)
    plain = GPT2LMHeadModel.from_pretrained(tmp_path)

    assert piped.state_dict().keys() == plain.state_dict().keys()
    assert piped.lm_head.weight is piped.transformer.wte.weight
    torch.testing.assert_close(piped(TOKENS).logits, plain(TOKENS).logits)


def test_blocks_are_spread_evenly_and_in_order_over_at_most_as_many_devices(gpt2_config):
    model = GPT2LMHeadModelParallel(gpt2_config)

    model.parallelize(["cpu:0", "cpu:1", "cpu:2"])

    assert [device.index for device in model.transformer.block_devices] == [0, 0, 1, 2]
    for devices in ([], ["cpu:0"] * 5):
        with pytest.raises(InputError, match="expected 1 to 4 devices for 4 blocks"):
            model.parallelize(devices)


def test_dropout_in_a_piped_gpt2_repeats_with_its_seed(gpt2_config):
    config = copy.deepcopy(gpt2_config)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.2
    model = GPT2LMHeadModelParallel(config).train()
    model.parallelize(["cpu:0", "cpu:1"])
    model._prepare_pipeline_parallel(1)
    losses = []

    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append(model(TOKENS, labels=TOKENS).loss.item())

    assert losses[0] == losses[1] != losses[2]
