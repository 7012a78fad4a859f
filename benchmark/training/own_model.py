"""A user's own model, `--model path/to/file.py:build`: any nn.Module with a batch and a loss.

    def build():                          # called on every worker, with the same seed
        return model, batch, loss         # batch: {name: tensor}, whose first dimension counts the examples of the data

    def loss(model, batch): ...           # the mean over the examples of a batch, which has the same names

    def metric(model, batch): ...         # optional: a number, the mean of which over some batches is shown

    def blocks(model): ...                # optional: the layers in the order of forward, each of which FSDP and ZeRO-3
                                          # gather as one piece; without it, the members of each nn.ModuleList

benchmark/example_model.py is one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset
from transformers.utils import ModelOutput

from common.errors import InputError
from common.paths import import_file

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Metric = Callable[[nn.Module, Batch], Tensor | float]
EXPECTED = "expected (model, {name: tensor}, loss), a batch whose tensors have the same first dimension"


@dataclass
class LossOutput(ModelOutput):
    """What forward returns: a class that FSDP2's and DeepSpeed's hooks know, since they look for tensors in it."""

    loss: Tensor | None = None
    metric: Tensor | float | None = None


class ModelWithLoss(nn.Module):
    """The user's model as the engines call it: `model(**batch).loss`; in evaluation also `.metric`, None without one.

    blocks: those that the file names, or None.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, blocks: list[nn.Module] | None, metric: Metric | None = None
    ) -> None:
        super().__init__()
        self.model, self.loss, self.metric = model, loss, metric
        self.config = getattr(model, "config", None)
        self.blocks = None if blocks is None else tuple(blocks)  # a list of modules would not be registered either

    def forward(self, **batch: Tensor) -> LossOutput:
        dtype = next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())
        values = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        metric = self.metric(self.model, values) if self.metric and not self.training else None
        return LossOutput(loss=self.loss(self.model, values), metric=metric)


def build_own(name: str) -> tuple[ModelWithLoss, Dataset]:
    """Return the model and the data of FILE.py:NAME. Raises InputError if they are not what the engines need."""
    path, _, function = name.rpartition(":")
    module = import_file(Path(path).resolve(), Path(path).stem)
    if not callable(getattr(module, function, None)):
        raise InputError(f"--model: there is no function {function!r} in {path}")
    built = getattr(module, function)()
    if not _is_complete(built):
        kinds = ", ".join(type(part).__name__ for part in (built if isinstance(built, tuple) else (built,)))
        raise InputError(f"--model: {function} of {path} returned {kinds}; {EXPECTED}")
    model, batch, loss = built
    named = list(module.blocks(model)) if hasattr(module, "blocks") else None
    return ModelWithLoss(model, loss, named, getattr(module, "metric", None)), StackDataset(**batch)


def _is_complete(built: object) -> bool:
    if not (isinstance(built, tuple) and len(built) == 3):
        return False
    model, batch, loss = built
    if not (isinstance(model, nn.Module) and isinstance(batch, dict) and batch and callable(loss)):
        return False
    tensors = all(isinstance(value, Tensor) and value.dim() for value in batch.values())
    return tensors and len({len(value) for value in batch.values()}) == 1


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's layers: what is gathered, used and given up again as one piece.

    They are what the user's file says, or the members of each nn.ModuleList that is not inside another one.
    """
    for module in model.modules():
        if isinstance(module, ModelWithLoss) and module.blocks is not None:
            return list(module.blocks)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(module) for one in lists for module in one.modules() if module is not one}
    return [layer for one in lists if id(one) not in inner for layer in one if any(True for _ in layer.parameters())]
