"""--pytest True: saves each worker's averaged gradients of the first step, so that you can compare them."""

import torch
from torch import nn

from common.paths import ROOT, atomic_write


def keep_gradients(model: nn.Module, rank: int) -> None:
    """Write tests/model{rank}_gradients.pth: the list of all gradients, in the order of model.parameters()."""
    gradients = [parameter.grad for parameter in model.parameters()]
    with atomic_write(ROOT / "tests" / f"model{rank}_gradients.pth", "wb") as file:
        torch.save(gradients, file)
