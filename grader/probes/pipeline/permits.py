"""A rank's way to the referee of its run, for partitions that must work at the same time. See ranks/referee.py."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 75_000  # of PBKDF2, what a turn costs; the same number stands in ranks/thread_times.py
CONTENT = 12  # numbers that a partition's arrival shows of its input, and of what it has made; see referee
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
Place = tuple[int, int]  # (micro-batch, partition)


class Permits:
    """Asks for permits, in all threads. `call` counts the calls of the pipe.

    begin(place) waits for the place's turn, if the run has turns, and returns its token. ask(place, x, made, token) is
    the permit for a place that has made `made` of x; it waits until all of its group have asked, and is 1 for a place
    that there is not.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.call = 0

        def begin(place: Place) -> str:
            return str(ask("begin", place=[self.call, *place]))

        def asked(place: Place, x: torch.Tensor, made: torch.Tensor, token: str = "") -> float:
            content, result = (tensor.detach().double().flatten()[:CONTENT] for tensor in (x, made))
            digest = pay(token, content.numpy().tobytes()) if token else ""
            return float(ask("permit", place=[self.call, *place], content=content, made=result, digest=digest))

        self.begin, self.ask = begin, asked


def pay(token: str, content: bytes) -> str:
    """Some milliseconds of work that nobody can shorten; it lets other threads run."""
    return hashlib.pbkdf2_hmac("sha256", token.encode() + content, b"", ROUNDS).hex()


def is_plain(x: object, stack_sizes: tuple[Callable[[], int], ...]) -> bool:
    """Whether torch alone computes with x in this thread: no class or mode of somebody else's answers instead."""
    return type(x) in PLAIN_TENSORS and not any(size() for size in stack_sizes)


def mode_stacks() -> tuple[Callable[[], int], ...]:
    """What counts the modes that this thread is in; taken before a student's code runs."""
    return torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
