"""A toy model whose gradients are drawn; sent to ranks as source, see grader/in_rank.py.

The gradient of each use of a parameter is a drawn tensor. The toy notes when backward reaches a use, before it stores
that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, held_back
    from grader.wire.values import Fields


class Toy(nn.Module):
    """A model of parameters without layers; parameter number `tied` is registered a second time.

    reached: a function that is called when backward reaches the use with this key.
    """

    def __init__(self, arguments: Fields, reached: Callable[[str], None]) -> None:
        super().__init__()
        self.reached = reached
        self.layers = nn.ModuleList([nn.Module() for _ in arguments["shapes"]])
        self.numbered: list[nn.Parameter] = []
        for k, (shape, dtype) in enumerate(zip(arguments["shapes"], arguments["dtypes"], strict=True)):
            values = torch.ones(shape, dtype=getattr(torch, dtype))
            parameter = nn.Parameter(values, requires_grad=k not in arguments["frozen"])
            self.layers[k].register_parameter("weight", parameter)
            self.numbered.append(parameter)
        if arguments["tied"] is not None:
            self.last = nn.Module()
            self.last.register_parameter("weight", self.numbered[arguments["tied"]])

    def forward(self, name: str, uses: Sequence[int], gradients: Sequence[Tensor]) -> Tensor:
        """Return a loss whose gradient with respect to use i, with the key `name i`, is gradients[i]."""
        total = torch.zeros((), dtype=torch.float64)
        for i, (k, gradient) in enumerate(zip(uses, gradients, strict=True)):
            weight = self.numbered[k].view_as(self.numbered[k])
            if weight.requires_grad:
                weight.register_hook(self._note(f"{name} {i}"))
            total = total + (weight * gradient.to(weight.dtype)).sum().double()
        return total

    def _note(self, key: str) -> Callable[[Tensor], None]:
        return lambda gradient: self.reached(key)


def note_reached(context: Context) -> Callable[[str], None]:
    return lambda key: context.event("reached", key=key)


def run_backward(context: Context, toy: Toy, inputs: Fields, step: int, number: int, late: int | None = None) -> None:
    """Run one micro-batch, between the events "backward" and "backward ended". Rank `late` begins after all others."""
    context.event("backward", step=step, micro=number)
    loss = toy(f"{step} {number}", inputs["uses"][step][number], inputs["gradients"][step][number])
    with held_back(context, late):
        torch.autograd.backward(loss)
    context.event("backward ended")
