"""A small GPT-2 of which a rank has a stage; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import copy_of


def small_gpt2(sizes: Mapping[str, Any], weights: Mapping[str, Tensor]) -> GPT2LMHeadModel:
    """Return GPT-2 of these sizes (arguments of GPT2Config) with these weights, without dropout."""
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "sdpa"  # it is causal without a mask, and the stages pass none
    model = GPT2LMHeadModel(config)
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    return model


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: copy_of(parameter.grad) for name, parameter in model.named_parameters()}
