"""Random numbers in a pipeline: the same seed gives the same dropout masks, whichever worker is faster.

All threads draw from one generator of the CPU. So if two partitions draw at the same time, timing decides which of them
gets which number. If dropout is on, each partition's work on each micro-batch therefore has its own generator.

On the CPU, for models whose only randomness is dropout, the same seed, partitions and split_size give the same masks,
whatever the timing. The backward pass uses the masks of its forward pass, and each micro-batch has different masks.
They are not the masks of the plain model. On GPUs, each device has its own generator. The same holds on GPUs if each
device has only one partition.
"""

import contextlib

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def draw_seed(modules: nn.Module) -> int | None:
    """Return a seed for one call of the pipe, from the generator that torch.manual_seed sets; None if no dropout is on.

    The caller's thread draws it, while all workers are idle.
    """
    dropouts = (module for module in modules.modules() if isinstance(module, nn.modules.dropout._DropoutNd))
    return int(torch.randint(2**62, ())) if any(dropout.training and dropout.p for dropout in dropouts) else None


def own_random_numbers(
    seed: int | None, partition: int, micro_batch: int, device: torch.device
) -> contextlib.AbstractContextManager:
    """Return a context in which this thread's random numbers depend only on these four arguments."""
    if seed is None or device.type != "cpu":
        return contextlib.nullcontext()
    generator = torch.Generator().manual_seed(hash((seed, partition, micro_batch)) % 2**63)
    return _DrawFrom(generator)


class _DrawFrom(TorchDispatchMode):
    """Gives `generator` to every operation that would draw from the common one. Costs about 5 us per operation."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _takes_generator(func):
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def _takes_generator(func) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)
