"""Helpers of the pipeline's tests: stages with labels, and layers that show how they are called.

Everything runs on labels (cpu:0, cpu:1, ...), so no GPU is needed; "wait for each other" is a barrier, not a sleep.
"""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pipeline.partition import WithDevice

DEADLINE = 20  # seconds after which something that should have happened has not


def labelled(*stages: nn.Module) -> nn.Sequential:
    """Stage j with the label cpu:j."""
    return nn.Sequential(*(WithDevice(stage, f"cpu:{j}") for j, stage in enumerate(stages)))


def mlp(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [
        nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()),
        nn.Linear(8, 5),
    ]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """Every test begins and ends without workers."""
    yield
    if worker_threads():
        gc.collect()  # a traceback can hold a pipe in a cycle
    for thread in worker_threads():
        thread.join(DEADLINE)
    assert not worker_threads()


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("partition ")}


class Meet(nn.Module):
    """Goes on only when the other partition is at work too; not with the micro-batch of value `alone`."""

    def __init__(self, phase: str, barrier: threading.Barrier, alone: float) -> None:
        super().__init__()
        self.phase, self.barrier, self.alone = phase, barrier, alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        if x.item() == self.alone:
            return y
        if self.phase == "forward":
            self.barrier.wait(DEADLINE)
        else:
            y.register_hook(self._meet)
        return y

    def _meet(self, gradient: torch.Tensor) -> None:
        self.barrier.wait(DEADLINE)


class Note(nn.Module):
    """A layer that writes down the grad mode of each forward and the thread of each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_modes: list[bool] = []
        self.backward_threads: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.grad_modes.append(torch.is_grad_enabled())
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda _: self.backward_threads.append(threading.current_thread().name))
        return y


class Fail(nn.Module):
    """A layer that raises in the forward or in the backward of the micro-batch whose first value is `at`."""

    def __init__(self, phase: str, at: float) -> None:
        super().__init__()
        self.phase, self.at = phase, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = x.flatten()[0].item() == self.at
        if bad and self.phase == "forward":
            raise LookupError("the layer's own words")
        y = x * 1
        if bad and self.phase == "backward":
            y.register_hook(self._raise)
        return y

    def _raise(self, gradient: torch.Tensor) -> None:
        raise LookupError("the layer's own words")
