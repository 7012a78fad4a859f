"""One worker, or one process for several GPUs: nothing is sent to another process."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from transformers.utils import ModelOutput

from benchmark.engines.engine import Engine


class Single(Engine):
    """One worker alone."""


class Autocast(nn.Module):
    """A model that enters autocast in the thread that calls it: DataParallel's threads enter it without the dtype."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager]) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, **batch: Tensor) -> ModelOutput:
        with self.autocast():
            output: ModelOutput = self.model(**batch)
        return output


class DP(Engine):
    """nn.DataParallel: one process, which copies the model to every GPU in every forward."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DataParallel(Autocast(model, self.half))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch).mean()  # one loss of every GPU
