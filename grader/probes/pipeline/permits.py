"""A rank's way to the referee of its run, for partitions that must work at the same time. See ranks/referee.py."""

from collections.abc import Callable
from typing import Any

import torch

CONTENT = 12  # numbers that a partition's arrival shows of its input, and of what it has made; see referee
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
Place = tuple[int, int]  # (micro-batch, partition)


class Permits:
    """Asks for permits, in all threads. `call` counts the calls of the pipe.

    ask(place, x, made) is the permit for a place that has made `made` of x; it waits until all of its group have asked,
    and is 1 for a place that there is not.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.call = 0

        def asked(place: Place, x: torch.Tensor, made: torch.Tensor) -> float:
            begin, content = (tensor.detach().double().flatten()[:CONTENT] for tensor in (x, made))
            return float(ask("permit", place=[self.call, *place], content=begin, made=content))

        self.ask = asked


def is_plain(x: object, stack_sizes: tuple[Callable[[], int], ...]) -> bool:
    """Whether torch alone computes with x in this thread: no class or mode of somebody else's answers instead."""
    return type(x) in PLAIN_TENSORS and not any(size() for size in stack_sizes)


def mode_stacks() -> tuple[Callable[[], int], ...]:
    """What counts the modes that this thread is in; taken before a student's code runs."""
    return torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
