"""Helpers of the pipeline's tests: stages with labels (cpu:0, cpu:1, ...), so that no GPU is needed; their workers."""

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
