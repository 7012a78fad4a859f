"""The names that a function of a lesson's test file finds where it runs in a rank; see grader/in_rank.py."""

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader.inside.context import Context
from grader.inside.started_processes import start_afresh
from grader.wire import tags

__all__ = [
    "Any", "Context", "Tensor", "copy_of", "dist", "dtype_of", "held_back", "hold", "nn", "np", "own_group", "release",
    "start_afresh", "surroundings", "tensors_of", "torch", "unchanged",
]  # fmt: skip


def copy_of(value: object) -> Tensor | None:
    """Return a copy of a tensor as it is now, None for anything else."""
    return value.detach().clone() if isinstance(value, Tensor) else None


def dtype_of(value: object) -> str:
    """Return the dtype of a tensor, or the class of anything else."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def tensors_of(value: object) -> list[Tensor | None] | str:
    """Return copies of a list of tensors, or the class of anything else."""
    if isinstance(value, list | tuple) and all(isinstance(item, Tensor) for item in value):
        return [copy_of(item) for item in value]
    return type(value).__name__


def own_group(context: Context) -> dist.ProcessGroup | None:
    """Make the groups of the argument `groups`, and return this rank's own; None, for all ranks, if it has none."""
    groups = context.arguments["groups"]
    made = [dist.new_group(ranks) for ranks in groups]
    return next((group for group, ranks in zip(made, groups, strict=True) if context.rank in ranks), None)


def surroundings(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> dict[str, object]:
    """Return what must not change when a function averages gradients, joins a group, or wraps a model."""
    return {
        "the state of torch's random generator": torch.get_rng_state().tolist(),
        "the state of Python's random generator": random.getstate(),
        "the state of numpy's random generator": np.random.get_state(legacy=False)["state"]["key"].tolist(),
        "torch's default dtype": str(torch.get_default_dtype()),
        "the mode of the model (train or eval)": [module.training for module in modules or model.modules()],
        "requires_grad of a parameter": [parameter.requires_grad for parameter in model.parameters()],
        "whether gradients are computed": torch.is_grad_enabled(),
        "the process group": dist.is_initialized(),
    }


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list. After the block, it names each item of `surroundings` that the block has changed."""
    changed: list[str] = []
    before = surroundings(model)
    yield changed
    after = surroundings(model)
    changed += [name for name in before if before[name] != after[name]]


@contextlib.contextmanager
def held_back(context: Context, rank: int | None) -> Iterator[None]:
    """Hold one rank back: its block begins when the blocks of all others have ended. None: no rank.

    If a program waits in its block for the rank that is held back, the broker reports a deadlock.
    """
    hold(context, rank)
    yield
    release(context, rank)


def hold(context: Context, rank: int | None) -> None:
    """Wait until all other ranks have called `release`, if this rank is the one that is held back."""
    if context.rank == rank:
        for other in (other for other in range(context.world_size) if other != rank):
            dist.recv(torch.zeros(1), other, tag=tags.GRADER_TAG)


def release(context: Context, rank: int | None) -> None:
    """Let the rank that is held back continue; all other ranks must call this."""
    if rank is not None and context.rank != rank:
        dist.send(torch.zeros(1), rank, tag=tags.GRADER_TAG)
