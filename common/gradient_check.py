"""--check_gradients: are the gradients of the first step those that one worker would compute on the same examples?

    gradient: x 1.0000
    gradient: x 0.2500 (every parameter): they were divided by the number of workers once too often

Every worker computes the gradient of its own batch once more, with a copy of the model. Their mean is what must be in
param.grad when the optimizer begins: after the exchange, and before the gradients are clipped.
"""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.workers.process_group import Worker

LIMIT = 1e-3  # relative error; float32 sums in another order stay far below it
TINY = 1e-6  # of the norm of all gradients: such a parameter is not judged, as the bias of attention's keys
SHOWN = 3  # names of parameters


@dataclass(frozen=True)
class ParameterPart:
    """One parameter's part of a gradient: its name, what the worker has, what is expected, what it had by itself."""

    name: str
    got: Tensor
    expected: Tensor
    own: Tensor


class GradientCheck:
    """Watches the first forward pass of `model`; `verdict` judges the gradients that its step has led to."""

    def __init__(self, model: nn.Module, worker: Worker):
        self.model, self.worker = model, worker
        self.inputs: tuple[tuple, dict] = ((), {})
        self.hook = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _model: nn.Module, arguments: tuple, keywords: dict) -> None:
        self.inputs = arguments, keywords
        self.hook.remove()

    def verdict(self) -> str:
        """Return one line; the same on every rank. Every rank calls it, at the same place of the first step."""
        own = self._own_gradient()
        parts = self._parts(own, self._mean(own))
        words = describe(parts, self.worker.world_size)
        everybodys: list = [words]
        if self.worker.world_size > 1:
            everybodys = [None] * self.worker.world_size
            dist.all_gather_object(everybodys, words)
        wrong = [(rank, words) for rank, words in enumerate(everybodys) if words != RIGHT]
        if not wrong:
            return f"gradient: {RIGHT}"
        rank, words = wrong[0]
        return f"gradient: {words}" + (f"; on rank {rank}" if len(set(everybodys)) > 1 else "")

    def _own_gradient(self) -> Tensor:
        """Return the gradient of this worker's batch, as one flat tensor; zeros for what has none."""
        model = copy.deepcopy(self.model)
        parameters = trained(model)
        arguments, keywords = self.inputs
        loss = model(*arguments, **keywords).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def _mean(self, own: Tensor) -> Tensor:
        if self.worker.world_size == 1:
            return own.double()
        everybodys = own.new_empty(self.worker.world_size * len(own))
        dist.all_gather_single(everybodys, own)
        return everybodys.view(self.worker.world_size, -1).double().mean(dim=0)

    def _parts(self, own: Tensor, mean: Tensor) -> list[ParameterPart]:
        parameters = trained(self.model)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
        sizes = [gradient.numel() for gradient in grads]
        columns = ([gradient.reshape(-1).double() for gradient in grads], mean.split(sizes), own.split(sizes))
        return [ParameterPart(name, *tensors) for name, *tensors in zip(parameters, *columns, strict=True)]


RIGHT = "x 1.0000"


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def describe(parts: list[ParameterPart], world_size: int) -> str:
    """Return the factor between two gradients, which parameters it concerns, and the likely cause; or RIGHT."""
    total = float(torch.cat([part.expected for part in parts]).norm())
    parts = [part for part in parts if not float((part.got + part.expected).norm()) <= TINY * total]
    wrong = [part for part in parts if not close(part.got, part.expected, total)]
    if not wrong:
        return RIGHT
    which = "every parameter" if len(wrong) == len(parts) else ", ".join(part.name for part in wrong[:SHOWN])
    which += f" and {len(wrong) - SHOWN} more" if SHOWN < len(wrong) < len(parts) else ""
    got, expected, own = (torch.cat([getattr(part, name) for part in wrong]) for name in ("got", "expected", "own"))
    if world_size > 1 and close(got, own.double(), total):
        return f"this worker's own ({which}): they were not exchanged with the other workers"
    factor = float(got @ expected / (expected @ expected))
    if not close(got, factor * expected, total):
        return f"not a multiple of what is expected ({which}): were they changed, or left from another step?"
    causes = {
        0.0: "there is no gradient",
        float(world_size): "they were summed and not divided by the number of workers",
        1 / world_size: "they were divided by the number of workers once too often",
    }
    cause = next((words for value, words in causes.items() if abs(factor - value) <= LIMIT), "the loss was scaled")
    return f"x {factor:.4f} ({which}): {cause}"


def close(got: Tensor, expected: Tensor, total: float) -> bool:
    """Return whether a gradient is as expected; `total` is the norm of all parameters' gradients together."""
    return bool((got - expected).norm() <= LIMIT * expected.norm() + TINY * total)
