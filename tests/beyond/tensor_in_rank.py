"""What a rank does with the layers of tensor parallelism; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dtype_of


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same values with other strides: expanded from one row, with holes between elements, or transposed."""
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    if layout == "holes":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.t().contiguous().t() if layout == "transposed" else tensor.clone()


def conv1d(weight: Tensor, bias: Tensor) -> Any:
    """Return a layer x W + b of GPT-2's kind."""
    layer = Conv1D(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


def described(layer: nn.Module, whole: Any, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the parameters of a layer, and whether they are its own."""
    named = dict(layer.named_parameters())
    found: dict[str, Any] = {"more": sorted(set(named) - {"weight", "bias"})}
    for name in ("weight", "bias"):
        value = getattr(layer, name, None)
        found |= {name: copy_of(value), f"{name}'s dtype": dtype_of(value)}
        found[f"{name}'s class"] = "Parameter" if name in named else dtype_of(value)
        found[f"{name} bytes"] = named[name].untyped_storage().nbytes() if name in named else 0
    found["frozen"] = [name for name, value in named.items() if not value.requires_grad]
    found["changed"] = [key for key, value in whole.named_parameters() if not torch.equal(value.detach(), given[key])]
    return found


def both_ways(context: Context, name: str, module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Any]:
    """Return the output and all gradients of a module, and whether the tensors that it was given are as they were."""
    module.zero_grad()
    leaf, given = x.clone().requires_grad_(), upstream.clone()
    context.event("forward", of=name)
    y = module(leaf)
    context.event("backward", of=name)
    found = {"dtype": dtype_of(y), "y": copy_of(y)}
    y.backward(given)
    context.event("ended")
    found |= {name: copy_of(parameter.grad) for name, parameter in module.named_parameters()}
    intact = torch.equal(leaf.detach(), x) and torch.equal(given, upstream)
    return found | {"x": copy_of(leaf.grad), "intact": intact}
