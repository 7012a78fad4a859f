"""A toy model whose gradients are drawn; sent to ranks as source, see grader/in_rank.py.

The gradient of each use of a parameter is a drawn tensor times a permit: a number that backward asks the grader for
when it reaches this use. So no rank has a gradient before the grader has noted that backward asked for its permit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, held_back


class Toy(nn.Module):
    """A model of parameters without layers; parameter number `tied` is registered a second time.

    ask_permit: a function that asks the grader for the permit with this key.
    """

    def __init__(self, arguments: dict[str, Any], ask_permit: Callable[[str], Any]) -> None:
        super().__init__()
        self.ask_permit = ask_permit
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
        """Return a loss whose gradient with respect to use i is gradients[i] times the permit `name i`."""
        total = torch.zeros((), dtype=torch.float64)
        for i, (k, gradient) in enumerate(zip(uses, gradients, strict=True)):
            weight = self.numbered[k].view_as(self.numbered[k])
            if weight.requires_grad:
                weight.register_hook(self._times_permit(f"{name} {i}"))
            total = total + (weight * gradient.to(weight.dtype)).sum().double()
        return total

    def _times_permit(self, key: str) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient * self.ask_permit(key).to(gradient.dtype)


def run_backward(context: Context, toy: Toy, inputs: Any, step: int, number: int, late: int | None = None) -> None:
    """Run one micro-batch, between the events "backward" and "backward ended". Rank `late` begins after all others."""
    context.event("backward", step=step, micro=number)
    loss = toy(f"{step} {number}", inputs["uses"][step][number], inputs["gradients"][step][number])
    with held_back(context, late):
        torch.autograd.backward(loss)
    context.event("backward ended")
