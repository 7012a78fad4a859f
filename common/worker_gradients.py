"""--pytest True: each worker's gradients of the first step, for `pytest -k a4_1_2` to compare."""

import torch
from torch import nn

from common.paths import ROOT, atomic_write


def keep_gradients(model: nn.Module, rank: int) -> None:
    """Write tests/model{rank}_gradients.pth: the list of all gradients, in the order of model.parameters()."""
    gradients = [parameter.grad for parameter in model.parameters()]
    with atomic_write(ROOT / "tests" / f"model{rank}_gradients.pth", "wb") as file:
        torch.save(gradients, file)
