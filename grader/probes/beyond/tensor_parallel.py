"""Runs a student's blocks of GPT-2, and squared_norm.

Of what is cut, a rank is given its own slices right, and noise in the others' places.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D

from grader.inside.context import Context
from grader.inside.tools import copy_of as copy
from grader.inside.tools import dtype_of as kind_of
from grader.inside.tools import own_group
from grader.wire.values import Fields

SEED = 1  # of dropout
Group = dist.ProcessGroup | None


def join(context: Context) -> Group:
    """Join, and return this rank's group of the argument `groups`; None if there are none: all ranks."""
    context.join()
    return own_group(context)


def linear(weight: Tensor, bias: Tensor) -> Conv1D:
    """A layer x W + b of GPT-2's kind."""
    layer = Conv1D(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


# --- a block of GPT-2 ---


def columns(context: Context) -> list[Any]:
    """attention_columns of each case. Arguments: file, cases (width, heads, head_dim)."""
    lesson = context.load(context.arguments["file"])
    found = []
    for width, heads, head_dim in context.arguments["cases"]:
        given = torch.tensor(heads)
        value = lesson.attention_columns(width, given, head_dim)
        found.append({"kind": kind_of(value), "value": copy(value), "intact": given.tolist() == heads})
    return found


def plain_block(a: Fields, weights: dict[str, Tensor]) -> Any:
    """A GPT2Block with these weights, in float64. Arguments: width, heads, inner (of the MLP), dropout (of the
    attention's weights, and of what is added to the residual)."""
    rates = dict(zip(("attn_pdrop", "resid_pdrop"), a["dropout"], strict=True))
    config = GPT2Config(n_embd=a["width"], n_head=a["heads"], n_inner=a["inner"], n_positions=16, **rates)
    config._attn_implementation = "sdpa"  # causal by itself: a block alone is given no mask
    block = GPT2Block(config, layer_idx=0).double()
    block.load_state_dict(weights)
    return block


def first(output: Any) -> Tensor:
    """The hidden states of a block; some versions of transformers return them in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def block(context: Context) -> Fields:
    """shard_block of a block, and its forward and backward. Arguments: file, groups, width, heads, inner, dropout;
    mine: weights, x, upstream."""
    a = context.arguments
    lesson = context.load(a["file"])
    mine = a["mine"]
    group = join(context)
    cut = plain_block(a, mine["weights"])
    torch.manual_seed(SEED)  # the same on all ranks, as after set_seed
    before = torch.random.get_rng_state()
    context.event("make block")
    if group is None:
        lesson.shard_block(cut)
    else:
        lesson.shard_block(cut, group)
    found: Fields = {
        "random": not torch.equal(before, torch.random.get_rng_state()),
        "heads": int(cut.attn.num_heads), "split": int(cut.attn.split_size), "training": cut.training,
        "parameters": {name: copy(value) for name, value in cut.named_parameters()},
    }  # fmt: skip
    found["passes"] = []
    for _ in range(2):
        cut.zero_grad()
        x = mine["x"].clone().requires_grad_()
        context.event("forward", of="block")
        y = first(cut(x))
        context.event("backward", of="block")
        y.backward(mine["upstream"])
        context.event("ended")
        gradients = {name: copy(parameter.grad) for name, parameter in cut.named_parameters()}
        found["passes"].append({"y": copy(y), "x": copy(x.grad), "gradients": gradients})
    return found


def whole_block(context: Context) -> Fields:
    """Forward and backward of the block on one worker, in a rank that loads no student's file. Arguments as `block`."""
    mine = context.arguments["mine"]
    whole = plain_block(context.arguments, mine["weights"])
    x = mine["x"].requires_grad_()
    torch.manual_seed(SEED)
    y = first(whole(x))
    values = [x, *whole.parameters()]
    gradients = torch.autograd.grad(y, values, mine["upstream"])
    names = [name for name, _ in whole.named_parameters()]
    return {"y": copy(y), "x": gradients[0], "gradients": dict(zip(names, gradients[1:], strict=True))}


# --- the norm ---


class Mixed(nn.Module):
    """Slices in several depths, a layer norm, and a parameter that several modules share."""

    def __init__(self, lesson: Any, sizes: list[int], group: Group) -> None:
        super().__init__()
        inside, outside, slices = sizes
        column = lesson.ColumnParallel(linear(torch.zeros(inside, outside), torch.zeros(outside)), slices, group)
        row = lesson.RowParallel(linear(torch.zeros(outside, inside), torch.zeros(inside)), slices, group)
        self.norm = nn.LayerNorm(inside)
        self.mlp = nn.ModuleDict({"fc": column, "act": nn.ReLU(), "proj": row})
        self.head, self.again = (nn.Linear(inside, outside, bias=False) for _ in range(2))
        self.again.weight = self.head.weight


def norms(context: Context) -> list[Fields]:
    """squared_norm of a model whose gradients are given, name by name; None for a parameter without gradient.

    Arguments: file, groups, inside, outside; mine: indices, cases (gradients by name).
    """
    a = context.arguments
    lesson = context.load(a["file"])
    group, found = join(context), []
    model = Mixed(lesson, [a["inside"], a["outside"], a["mine"]["indices"]], group)
    for dtype, gradients in zip(a["dtypes"], a["mine"]["cases"], strict=True):
        model.to(getattr(torch, dtype))
        for name, parameter in model.named_parameters():
            given = gradients[name]
            parameter.grad = None if given is None else given.to(parameter.dtype).clone()
        context.event("norm")
        value = lesson.squared_norm(model) if group is None else lesson.squared_norm(model, group)
        context.event("ended")
        left = {name: copy(parameter.grad) for name, parameter in model.named_parameters()}
        found.append({"kind": kind_of(value), "value": copy(value), "left": left, "graph": needs_gradient(value)})
    return found


def needs_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
