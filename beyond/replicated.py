"""The strategy object of run_gpt2.py for ring and overlap, in which nothing is sharded. This code is given."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from common.optim import weight_decay_groups


class Replicated:
    """Every rank has all parameters, gradients and optimizer state; `finish` averages the gradients.

    It has the methods of ShardedOptimizer and ShardedModel, so that one training loop serves all lessons.
    """

    def __init__(
        self,
        model: nn.Module,
        finish: Callable[[], None],
        make_optimizer: Callable[[list[dict]], Optimizer],
        weight_decay: float,
    ) -> None:
        self.model, self.finish = model, finish
        self.optimizer = make_optimizer(weight_decay_groups(model, weight_decay))

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; return the norm before scaling."""
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients, before the next step."""
        self.model.zero_grad()
