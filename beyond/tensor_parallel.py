"""Tensor parallelism: the ranks of a group compute one layer together; each has a slice of its matrices.

GPT-2's MLP is Y = gelu(X A + a) B + b. Cut A by columns and B by rows:

              A                   H = gelu(...)              B
          ┌───┬───┐                ┌───┬───┐            ┌─────────┐
    X ──f─┤ 0 │ 1 │   ──────>    H │ 0 │ 1 │  ──────>   │    0    │ ──g──> + b = Y
          └───┴───┘                └───┴───┘            ├─────────┤
       by columns: no sum      gelu acts on every       │    1    │ by rows: Y is the sum over the ranks
                               element alone            └─────────┘

Between the two matrices, nothing is exchanged. The forward of f is the backward of g, and the other way around:

    f  to_slices   forward: X as it is                  backward: sum of the gradients over the ranks
    g  sum_slices  forward: sum over the ranks          backward: the gradient as it is

So a block exchanges one activation of shape (B, T, width) for its MLP and one for its attention, in the forward
and in the backward pass. All ranks of the group see the same batch.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

Group = dist.ProcessGroup | None  # None: all ranks


class ToSlices(torch.autograd.Function):
    """f: passes x, which is the same on all ranks, to this rank's slice of the layer. Use to_slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """b.11 [1] Keep the group in ctx for backward; return x."""
        # TODO(cos598d) b.11: [1] keep the group, pass x on (about 2 lines)
        # BEGIN SOLUTION b.11
        ctx.group = group
        return x.view_as(x)
        # END SOLUTION b.11

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """b.11 [2] Every slice contributes to the gradient of x: return the sum over the group, and None for the group.

        Do not change `gradient` in place: autograd may still use it.
        """
        # TODO(cos598d) b.11: [2] sum the gradient over the group (about 3 lines)
        # BEGIN SOLUTION b.11
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
        # END SOLUTION b.11


class SumSlices(torch.autograd.Function):
    """g: the outputs of the ranks' slices are added, and every rank has the sum. Use sum_slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """b.11 [3] Return the sum of x over the group; do not change x in place."""
        # TODO(cos598d) b.11: [3] sum x over the group (about 3 lines)
        # BEGIN SOLUTION b.11
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total
        # END SOLUTION b.11

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """b.11 [4] The derivative of the sum with respect to x is 1.

        Return the gradient as it is, and None for the group.
        """
        # TODO(cos598d) b.11: [4] pass the gradient on (1 line)
        # BEGIN SOLUTION b.11
        return gradient, None
        # END SOLUTION b.11


def to_slices(x: Tensor, group: Group) -> Tensor:
    """Return x; in backward, its gradient is the sum over the group."""
    return ToSlices.apply(x, group)  # type: ignore[no-any-return]


def sum_slices(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the group; in backward, the gradient stays as it is."""
    return SumSlices.apply(x, group)  # type: ignore[no-any-return]


class ColumnParallel(nn.Module):
    """Some output columns of a linear layer x W + b.

    layer: GPT-2's Conv1D has weight (in, out) and bias (out,); it stays as it is: others may use it.
    columns: the indices of this rank's columns.
    """

    def __init__(self, layer: Conv1D, columns: Tensor, group: Group = None) -> None:
        """Copy the columns.

        b.11 [5] self.weight and self.bias are Parameters with this rank's columns only, with their own memory.
        """
        super().__init__()
        self.group = group
        # TODO(cos598d) b.11: [5] make Parameters of this rank's columns (2 lines)
        # BEGIN SOLUTION b.11
        self.weight = Parameter(layer.weight.data[:, columns].clone())
        self.bias = Parameter(layer.bias.data[columns].clone())
        # END SOLUTION b.11

    def forward(self, x: Tensor) -> Tensor:
        """(..., in), the same on every rank -> (..., columns of this rank)

        b.11 [6] Apply f, then the layer with this rank's columns.
        """
        # TODO(cos598d) b.11: [6] apply f, then the layer (1 line)
        # BEGIN SOLUTION b.11
        return to_slices(x, self.group) @ self.weight + self.bias
        # END SOLUTION b.11


class RowParallel(nn.Module):
    """Some input rows of a linear layer x W + b; the output is the whole sum.

    layer: as in ColumnParallel. rows: the indices of this rank's rows.
    """

    def __init__(self, layer: Conv1D, rows: Tensor, group: Group = None) -> None:
        """Copy the rows.

        b.11 [7] self.weight has this rank's rows. self.bias is whole, on every rank. Both have their own memory.
        """
        super().__init__()
        self.group = group
        # TODO(cos598d) b.11: [7] make Parameters of this rank's rows and of the whole bias (2 lines)
        # BEGIN SOLUTION b.11
        self.weight = Parameter(layer.weight.data[rows].clone())
        self.bias = Parameter(layer.bias.data.clone())
        # END SOLUTION b.11

    def forward(self, x: Tensor) -> Tensor:
        """(..., rows of this rank) -> (..., out), the same on every rank

        b.11 [8] Compute the product with this rank's rows, then apply g. The bias is added once, not once per rank.
        """
        # TODO(cos598d) b.11: [8] multiply, apply g, add the bias (1 line)
        # BEGIN SOLUTION b.11
        return sum_slices(x @ self.weight, self.group) + self.bias
        # END SOLUTION b.11


def own_part(length: int, group: Group) -> Tensor:
    """Return this rank's part of the indices 0 to length - 1: equal parts, in the order of the ranks in the group."""
    return torch.arange(length).chunk(dist.get_world_size(group))[dist.get_rank(group)]


def attention_columns(width: int, heads: Tensor, head_dim: int) -> Tensor:
    """Return the columns of c_attn that belong to some heads, in the order q, k, v.

    width: the model's. c_attn has 3 width columns: all queries, then all keys, then all values; in each third, head h
    has the columns h head_dim to (h+1) head_dim. heads: the heads' numbers, ascending.

    b.12 [1] Return the columns of these heads in the first third, then in the second, then in the third.
    """
    # TODO(cos598d) b.12: [1] list the columns of these heads (about 3 lines)
    # BEGIN SOLUTION b.12
    of_heads = (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
    return torch.cat([of_heads + third * width for third in range(3)])
    # END SOLUTION b.12


def shard_block(block: Any, group: Group = None) -> None:
    """Replace the four matrices of a GPT2Block by this rank's slices.

    The number of heads and the width of the MLP must be divisible by the size of the group. The layer norms stay whole:
    their gradients are equal on all ranks.

    b.12 [2] MLP: cut c_fc by columns and c_proj by rows; this rank has own_part of the columns of c_fc.
         [3] Attention: cut c_attn by columns and c_proj by rows; this rank has own_part of the heads. After c_attn, the
             outputs of these heads are concatenated, and c_proj must keep the matching rows.
         [4] attention.split_size is the width of q, of k and of v: the attention cuts there. attention.num_heads is the
             number of heads. Set both for this rank's heads.
    """
    mlp, attention = block.mlp, block.attn
    width, head_dim = attention.embed_dim, attention.head_dim
    # TODO(cos598d) b.12: [2] to [4] replace the four matrices; set the attention's sizes (about 9 lines)
    # BEGIN SOLUTION b.12
    hidden = own_part(mlp.c_fc.weight.shape[1], group)
    mlp.c_fc = ColumnParallel(mlp.c_fc, hidden, group)
    mlp.c_proj = RowParallel(mlp.c_proj, hidden, group)
    heads = own_part(attention.num_heads, group)
    columns = attention_columns(width, heads, head_dim)
    attention.c_attn = ColumnParallel(attention.c_attn, columns, group)
    attention.num_heads = len(heads)
    attention.split_size = len(heads) * head_dim
    attention.c_proj = RowParallel(attention.c_proj, columns[: attention.split_size], group)
    # END SOLUTION b.12


def squared_norm(model: nn.Module, group: Group = None) -> Tensor:
    """Return the square of the norm of the whole model's gradient, as a tensor with one number, the same on all ranks.

    b.12 [5] A slice is on one rank only: the squares of its gradient are summed over the group. Every other parameter
             is on all ranks, and counts once. `sliced` yields the slices. Parameters may have no gradient.
    """
    # TODO(cos598d) b.12: [5] add up squares, slices over the group and the rest once (about 8 lines)
    # BEGIN SOLUTION b.12
    slices = set(sliced(model))
    device = next(model.parameters()).device
    on_one_rank, on_all_ranks = torch.zeros((), device=device), torch.zeros((), device=device)
    for parameter in model.parameters():
        if parameter.grad is not None:
            (on_one_rank if parameter in slices else on_all_ranks).add_(parameter.grad.square().sum())
    dist.all_reduce(on_one_rank, group=group)
    return on_one_rank + on_all_ranks
    # END SOLUTION b.12


def sliced(model: nn.Module) -> Iterable[Parameter]:
    """Yield the parameters of which this rank has a slice. The bias of a RowParallel is whole."""
    for module in model.modules():
        if isinstance(module, ColumnParallel):
            yield from (module.weight, module.bias)
        elif isinstance(module, RowParallel):
            yield module.weight
