"""What a strategy has to do right: a few short trainings, each of which shows mistakes that the others hide.

AdamW divides by the gradient's size, and clipping by its norm: both hide a factor. So most cases take steps of SGD at
rate 1 without clipping, where the change of a parameter is its gradient. The second step shows what the first one left
behind. Accumulation has mistakes of its own, and so have modules that are used several times in one forward.
"""

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmark.settings import Settings
from benchmark.training.own_model import LossOutput

if TYPE_CHECKING:
    from benchmark.training.workload import Workload

NOISE = 1e-9  # of the mean gradient: in fp32, rounding alone is more


@dataclass(frozen=True)
class Case:
    """A short training. clipped: to half of its first gradient's norm. twice: every module is used twice."""

    name: str
    accumulation: int
    steps: int = 2
    clipped: bool = False
    twice: bool = False
    optimizer: str = "sgd"

    def settings(self, settings: Settings, max_grad_norm: float = 0.0) -> Settings:
        """Return the settings of this training. The decay is large, since a usual one is not seen in so few steps."""
        is_sgd = self.optimizer == "sgd"
        return replace(
            settings,
            accumulation=self.accumulation,
            max_steps=self.steps,
            max_grad_norm=max_grad_norm,
            optimizer=self.optimizer,
            learning_rate=self.rate(0),
            weight_decay=0.0 if is_sgd else 5.0,
            adam_epsilon=1e-8,
            dropout=0.0,
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step. AdamW's falls: an engine must not keep the first one."""
        if self.optimizer == "sgd":
            return 1.0
        return 1e-3 if step < self.steps // 2 else 5e-4


def cases(accumulation: int) -> list[Case]:
    """Return the cases of a strategy: an accumulation of 2 (or more, if the settings say so) is always among them."""
    many = max(2, accumulation)
    return [
        Case("accumulation 1", 1),
        Case(f"accumulation {many}", many),
        Case("modules used twice", many, twice=True),
        Case("clipping", many, clipped=True),
        Case("AdamW", 1, steps=8, clipped=True, optimizer="adamw"),
    ]


class Twice(nn.Module):
    """A model whose forward uses another one twice: on the examples as they are, and on those of the other end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, **batch: Tensor) -> LossOutput:
        """Return the mean loss of both."""
        turned = {name: value.flip(-1) for name, value in batch.items()}
        return LossOutput(loss=(self.model(**batch).loss + self.model(**turned).loss) / 2)


def built(case: Case, model: nn.Module) -> nn.Module:
    """The model of a case. ReLUs become smooth: at a kink, rounding alone decides whether a weight has a gradient."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.GELU())
    return Twice(model) if case.twice else model


def in_double(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Reference:
    """What a case must give. parameters: before the first step and after each, in fp64.

    is_noise: of each parameter, the elements whose gradient is rounding, such as the bias before a BatchNorm's.
    """

    max_grad_norm: float
    parameters: list[dict[str, Tensor]]
    norms: list[float]
    losses: list[float]
    is_noise: dict[str, Tensor]


def reference(case: Case, settings: Settings, workload: "Workload") -> Reference:
    """Train with plain PyTorch in fp64 in this process alone, which takes each rank's micro-batches in turn."""
    from benchmark.engines.engine import optimizer_class
    from common.optim import weight_decay_groups

    alone = replace(case.settings(settings), strategy="single", recompute=False, compile=None)
    model = built(case, workload.build(alone).double())
    optimizer = optimizer_class(alone)(weight_decay_groups(model, alone.weight_decay))
    ranks = [workload.batches(replace(alone, rank=rank)) for rank in range(settings.world_size)]
    parameters, norms, losses, limit = [in_double(model)], [], [], 0.0
    is_noise = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for step in range(case.steps):
        total = 0.0
        for batches in ranks:
            for batch in islice(batches, case.accumulation):
                loss = model(**batch).loss / (case.accumulation * len(ranks))
                loss.backward()
                total += loss.item()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values()).item()
        typical = norm / math.sqrt(sum(gradient.numel() for gradient in gradients.values()))
        for name, gradient in gradients.items():
            is_noise[name] |= (gradient != 0) & (gradient.abs() < NOISE * typical)
        if case.clipped:
            limit = limit or float(f"{norm / 2:.4g}")
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, torch.tensor(norm, dtype=torch.float64))
        for group in optimizer.param_groups:
            group["lr"] = case.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        parameters.append(in_double(model))
        norms.append(norm)
        losses.append(total)
    return Reference(limit, parameters, norms, losses, is_noise)
