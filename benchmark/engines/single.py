"""One worker, or one process for several GPUs: nothing is sent to another process."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from benchmark.engines.engine import Engine


class Single(Engine):
    """One worker alone."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


class DP(Engine):
    """nn.DataParallel: one process, which copies the model to every GPU in every forward."""

    def wrap(self, model: nn.Module) -> Any:
        return DataParallel(model)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch).mean()  # one loss of every GPU
