"""Runs a student's f and g, the two parallel layers, blocks of GPT-2, and squared_norm.

Of what is cut, a rank is given its own slices right, and noise in the others' places.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D

from grader.inside.context import Context
from grader.wire.values import Fields

FUNCTIONS = ("to_slices", "sum_slices")
SEED = 1  # of dropout
Group = dist.ProcessGroup | None


def join(context: Context) -> Group:
    """Join, and make the groups of the argument `groups`. Returns this rank's; None if there are none: all ranks."""
    context.join()
    groups = context.arguments["groups"]
    made = [dist.new_group(ranks) for ranks in groups]
    return next((group for group, ranks in zip(made, groups, strict=True) if context.rank in ranks), None)


def kind_of(value: object) -> str:
    """The dtype of a tensor, or the name of what is none."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def copy(value: object) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else None


# --- f and g ---


def functions(context: Context) -> Fields:
    """Both functions, forward and backward, and both at once with two groups.

    Arguments: file, groups, cases ((dtype, layout) of each); mine: cases (x and upstream of each), twice (the same).
    """
    lesson = context.load(context.arguments["file"])
    mine = context.arguments["mine"]
    group = join(context)
    found: Fields = {name: [] for name in FUNCTIONS}
    for name in FUNCTIONS:
        for (dtype, layout), given in zip(context.arguments["cases"], mine["cases"], strict=True):
            x, upstream = (laid_out(given[key].to(getattr(torch, dtype)), layout) for key in ("x", "upstream"))
            found[name].append(one_function(context, name, getattr(lesson, name), (x, upstream), group))
    found["twice"] = {name: twice(getattr(lesson, name), mine["twice"], group) for name in FUNCTIONS}
    return found


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides: expanded from one row, with holes between elements, or transposed."""
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    if layout == "holes":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.t().contiguous().t() if layout == "transposed" else tensor.clone()


def one_function(
    context: Context, name: str, function: Callable[..., Any], given: tuple[Tensor, Tensor], group: Group
) -> Fields:
    x, upstream = given[0].requires_grad_(), given[1]
    context.event("forward", of=name)
    y = function(x, group)
    context.event("backward", of=name)
    found = {"kind": kind_of(y), "y": copy(y), "x": copy(x)}
    if isinstance(y, Tensor):
        (gradient,) = torch.autograd.grad(y, x, upstream)
        found |= {"gradient": copy(gradient), "gradient kind": kind_of(gradient), "upstream": copy(upstream)}
    context.event("ended")
    with torch.no_grad():
        found["without gradients"] = copy(function(x.detach(), group))
    return found


def twice(function: Callable[..., Any], given: list[dict[str, Tensor]], group: Group) -> list[Tensor]:
    """The gradients of two calls, the first with this rank's group and the second with all ranks."""
    leaves = [pair["x"].clone().requires_grad_() for pair in given]
    made = [function(x, among) for x, among in zip(leaves, (group, None), strict=True)]
    for y, pair in zip(made, given, strict=True):
        y.backward(pair["upstream"])
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


# --- layers ---


def linear(weight: Tensor, bias: Tensor) -> Conv1D:
    """A layer x W + b of GPT-2's kind."""
    layer = Conv1D(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


def layers(context: Context) -> list[Fields]:
    """Both layers alone, and one after the other with a relu between them.

    Arguments: file, groups, dtypes (of each case), passes (whether they compute as well); mine: of each case `column`
    and `row` (weight, bias, indices, x, upstream).
    """
    lesson = context.load(context.arguments["file"])
    group, found = join(context), []
    for dtype, given in zip(context.arguments["dtypes"], context.arguments["mine"], strict=True):
        for one in given.values():
            one |= {name: tensor.to(getattr(torch, dtype)) for name, tensor in one.items() if name != "indices"}
        made = {}
        for name, kind in (("column", lesson.ColumnParallel), ("row", lesson.RowParallel)):
            one = given[name]
            whole = linear(one["weight"], one["bias"])
            context.event(f"make {name}")
            made[name] = kind(whole, one["indices"], group)
            told = described(made[name], whole) | {"changed": changed(whole, one)}
            if context.arguments["passes"]:
                told |= passed(context, name, made[name], one["x"], one["upstream"])
            found.append(told)
        if context.arguments["passes"]:
            pair = nn.Sequential(made["column"], nn.ReLU(), made["row"])
            found.append(passed(context, "pair", pair, given["column"]["x"], given["row"]["upstream"]))
    return found


def described(module: nn.Module, whole: Conv1D) -> Fields:
    """The parameters of a layer: their values, what shares memory with the whole layer, and what is no Parameter."""
    theirs = {parameter.untyped_storage().data_ptr() for parameter in whole.parameters()}
    named = dict(module.named_parameters())
    tensors = {name: getattr(module, name, None) for name in ("weight", "bias")}
    return {
        "parameters": {name: copy(value) for name, value in tensors.items()},
        "kinds": {name: kind_of(value) for name, value in tensors.items()},
        "named": sorted(named),
        "shared": [name for name, value in named.items() if value.untyped_storage().data_ptr() in theirs],
        "frozen": [name for name, value in named.items() if not value.requires_grad],
        "held": {name: value.untyped_storage().nbytes() for name, value in named.items()},
    }


def changed(whole: Conv1D, given: dict[str, Tensor]) -> list[str]:
    return [name for name, value in whole.named_parameters() if not torch.equal(value.detach(), given[name])]


def passed(context: Context, name: str, module: nn.Module, x: Tensor, upstream: Tensor) -> Fields:
    """Forward and backward: the output and all gradients, and what came of the tensors that were given."""
    module.zero_grad()
    leaf, given = x.clone().requires_grad_(), upstream.clone()
    context.event("forward", of=name)
    y = module(leaf)
    context.event("backward", of=name)
    found: Fields = {"kind": kind_of(y), "y": copy(y)}
    if isinstance(y, Tensor):
        y.backward(given)
        found |= {"x": copy(leaf.grad), "intact": torch.equal(leaf.detach(), x) and torch.equal(given, upstream)}
        found["gradients"] = {name: copy(parameter.grad) for name, parameter in module.named_parameters()}
    context.event("ended")
    return found


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
