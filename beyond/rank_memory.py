"""The memory that a strategy keeps on this rank, in bytes. This code is given."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer


def persistent_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of all parameters, gradients and optimizer state; memory that several tensors share counts once.

    Call it before the gradients are dropped. What a step needs only for a while is not included: activations, messages
    in transit, gathered blocks. common/peak_memory.py measures those, too.
    """
    storages = {}
    for tensor in _tensors(model, optimizer):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for kept in (*model.parameters(), *updated):
        yield kept
        if kept.grad is not None:
            yield kept.grad
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
