"""The memory that a strategy takes on this rank, in bytes. This code is given."""

import resource
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def persistent_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of all parameters, gradients and optimizer state; memory that several tensors share counts once.

    Call it before the gradients are dropped. What a step needs only for a while is not included: activations, messages
    in transit, gathered blocks.
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


class PeakMemory:
    """Measures how much the peak memory of this process has grown since this object was created.

    On a GPU, this is what torch has allocated there. On a CPU, it is the process's resident memory, which includes
    memory that torch and Python keep for later use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.start = self._peak()

    def bytes(self) -> int:
        """Return the bytes. On a CPU, this is 0 if the process has held more memory at an earlier time."""
        return self._peak() - self.start

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest  # macOS counts bytes, Linux KiB
