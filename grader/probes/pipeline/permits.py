"""A rank's way to the referee of its run, for partitions that must work at the same time. See ranks/referee.py."""

from collections.abc import Callable
from typing import Any

import torch

CONTENT = 12  # numbers of a partition's input that go with its arrival, see referee
Place = tuple[int, int]  # (micro-batch, partition)


class Permits:
    """Asks for permits, in all threads. `call` counts the calls of the pipe."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask, self.call = ask, 0

    def ask(self, place: Place, x: torch.Tensor) -> float:
        """The permit for this place; waits until all of its group have asked. 1 for a place that there is not."""
        content = x.detach().double().flatten()[:CONTENT]
        return float(self._ask("permit", place=[self.call, *place], content=content))
