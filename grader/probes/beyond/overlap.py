"""Runs a student's gradient reducer on a toy whose gradients are drawn, and leads one rank behind the others.

The gradient of each use of a parameter is a drawn tensor times a permit: a number that backward asks the grader for
when it comes to this use. So nobody has a gradient before the grader has noted that it was asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader.inside.context import Context
from grader.wire import tags
from grader.wire.values import Fields


def buckets(context: Context) -> list[list[list[int]]]:
    """make_buckets of each case in mine: sizes, dtypes, bucket_bytes. Returns the numbers of the parameters."""
    a = context.arguments
    overlap = context.load(a["file"])
    found = []
    for case in a["mine"]:
        parameters = [
            nn.Parameter(torch.zeros(size, dtype=getattr(torch, dtype)))
            for size, dtype in zip(case["sizes"], case["dtypes"], strict=True)
        ]
        number = {id(parameter): i for i, parameter in enumerate(parameters)}
        made = overlap.make_buckets(parameters, case["bucket_bytes"])
        found.append([[number.get(id(parameter), -1) for parameter in bucket] for bucket in made])
    return found


def order(context: Context) -> list[Any]:
    """agree_on_order of each case in mine: count, ready. Returns the numbers of the parameters."""
    a = context.arguments
    overlap = context.load(a["file"])
    mine = a["mine"]
    context.join()
    found = []
    for case in mine:
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(case["count"])]
        number = {id(parameter): i for i, parameter in enumerate(parameters)}
        ready = dict.fromkeys(parameters[i] for i in case["ready"])
        agreed = overlap.agree_on_order(ready, parameters)
        known = isinstance(agreed, list | tuple)
        found.append([number.get(id(parameter), -1) for parameter in agreed] if known else type(agreed).__name__)
    return found


class Toy(nn.Module):
    """Parameters in the order of their shapes; `tied` is registered a second time. `mine` is this rank's part."""

    def __init__(self, arguments: Fields, later: Callable[[str], Any]) -> None:
        super().__init__()
        self.later = later
        self.layers = nn.ModuleList([nn.Module() for _ in arguments["shapes"]])
        self.numbered: list[nn.Parameter] = []
        for k, (shape, dtype) in enumerate(zip(arguments["shapes"], arguments["dtypes"], strict=True)):
            parameter = nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)), k not in arguments["frozen"])
            self.layers[k].register_parameter("weight", parameter)
            self.numbered.append(parameter)
        if arguments["tied"] is not None:
            self.last = nn.Module()
            self.last.register_parameter("weight", self.numbered[arguments["tied"]])

    def forward(self, name: str, uses: Sequence[int], gradients: Sequence[Tensor]) -> Tensor:
        """A loss whose gradient with respect to use i is gradients[i] times the permit `name i`."""
        total = torch.zeros((), dtype=torch.float64)
        for i, (k, gradient) in enumerate(zip(uses, gradients, strict=True)):
            weight = self.numbered[k].view_as(self.numbered[k])
            if weight.requires_grad:
                weight.register_hook(self._permit(f"{name} {i}"))
            total = total + (weight * gradient.to(weight.dtype)).sum().double()
        return total

    def _permit(self, key: str) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient * self.later(key).to(gradient.dtype)


def reduce(context: Context) -> list[Fields]:
    """Some steps with a GradientReducer; returns of each step the gradients at its end.

    Arguments: file, shapes, dtypes, frozen, tied, bucket_bytes; micros (of each step, how many micro-batches), late (of
    each step, the rank that waits for the backward of all others, or None), finish (whether the student's finish and
    no_sync are called, or backward is looked at alone), fails (steps with an exception in a no_sync), zero (steps after
    which gradients are set to zero and not to None); mine: uses and gradients, [step][micro-batch].
    """
    a = context.arguments
    overlap = context.load(a["file"])
    mine = a["mine"]
    context.join()
    toy = Toy(a, context.later)
    reducer = overlap.GradientReducer(toy, a["bucket_bytes"])
    found = []
    for step, micros in enumerate(a["micros"]):
        context.event("step")
        for micro in range(micros):
            last = micro == micros - 1
            with nullcontext() if last else accumulating(reducer, a["finish"], step in a["fails"]):
                loss = toy(f"{step} {micro}", mine["uses"][step][micro], mine["gradients"][step][micro])
                with behind(context, a["late"][step] if last else None):
                    torch.autograd.backward(loss)
                context.event("micro-batch ended")
        if a["finish"]:
            reducer.finish()
        else:
            for bucket in reducer.buckets:
                if (handle := bucket.work) is not None:
                    handle.wait()
        found.append({
            "grads": [None if p.grad is None else p.grad.detach().clone() for p in toy.numbered],
            "dtypes": [None if p.grad is None else str(p.grad.dtype).removeprefix("torch.") for p in toy.numbered],
            "moved": [k for k, p in enumerate(toy.numbered) if not bool((p == 1).all())],
        })  # fmt: skip
        for parameter in toy.numbered:
            if step in a["zero"] and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
    return found


@contextmanager
def accumulating(reducer: Any, students: bool, fails: bool) -> Iterator[None]:
    """Under the student's no_sync, which an exception may leave; or with `sync` set by hand."""
    if not students:
        reducer.sync = False
        yield
        reducer.sync = True
        return
    try:
        with reducer.no_sync():
            yield
            if fails:
                raise Interrupted
    except Interrupted:
        pass


class Interrupted(BaseException):
    """Ends a no_sync block early; no Exception, as Ctrl-C is none."""


@contextmanager
def behind(context: Context, late: int | None) -> Iterator[None]:
    """The block of rank `late` begins when those of all others have ended: who waits inside for it, waits forever."""
    box, others = torch.zeros(1), [rank for rank in range(context.world_size) if rank != late]
    if context.rank == late:
        for other in others:
            dist.recv(box, other, tag=tags.OURS)
    yield
    if late is not None and context.rank != late:
        dist.send(box, late, tag=tags.OURS)
