"""Helpers for the layers of tensor parallelism in a rank; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dtype_of
    from grader.wire.values import Fields


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same values with other strides: expanded from one row, with holes between elements, or transposed."""
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    if layout == "holes":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.t().contiguous().t() if layout == "transposed" else tensor.clone()


def conv1d(weight: Tensor, bias: Tensor) -> Conv1D:
    """Return a layer x W + b, as GPT-2 has them."""
    layer = Conv1D(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


def described(layer: nn.Module, whole: nn.Module, given: Mapping[str, Tensor]) -> Fields:
    """Return the parameters of a layer, and whether the whole layer `whole` has changed."""
    named = dict(layer.named_parameters())
    report: Fields = {"more": sorted(set(named) - {"weight", "bias"})}
    for name in ("weight", "bias"):
        value = getattr(layer, name, None)
        report |= {name: copy_of(value), f"{name}'s dtype": dtype_of(value)}
        report[f"{name}'s class"] = "Parameter" if name in named else dtype_of(value)
        report[f"{name} bytes"] = named[name].untyped_storage().nbytes() if name in named else 0
        is_shared = isinstance(value, Tensor) and value.data_ptr() == getattr(whole, name).data_ptr()
        report[f"{name} is shared"] = is_shared
    report["frozen"] = [name for name, value in named.items() if not value.requires_grad]
    report["changed"] = [key for key, value in whole.named_parameters() if not torch.equal(value.detach(), given[key])]
    return report


def both_ways(context: Context, name: str, module: nn.Module, x: Tensor, upstream: Tensor) -> Fields:
    """Return the output and all gradients of a module, and whether its input tensors are unchanged."""
    module.zero_grad()
    leaf, given = x.clone().requires_grad_(), upstream.clone()
    context.event("forward", of=name)
    y = module(leaf)
    context.event("backward", of=name)
    values = {"dtype": dtype_of(y), "y": copy_of(y)}
    y.backward(given)
    context.event("ended")
    values |= {name: copy_of(parameter.grad) for name, parameter in module.named_parameters()}
    intact = torch.equal(leaf.detach(), x) and torch.equal(given, upstream)
    return values | {"x": copy_of(leaf.grad), "intact": intact}
