"""Runs task 4's functions: the sync that writes down what it sends, and the expectations, each alone."""

from typing import Any

import torch
from torch import nn

from grader import draws
from grader.probes import Context

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Watched(list):
    """A list that tells of every entry when it comes, so that its place among the calls is known."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def append(self, entry: Any) -> None:
        self.context.event("entry", entry=plain(entry))
        super().append(entry)

    def extend(self, entries: Any) -> None:
        for entry in entries:
            self.append(entry)

    def __iadd__(self, entries: Any) -> "Watched":  # type: ignore[misc, override]
        self.extend(entries)
        return self


def plain(entry: Any) -> dict[str, Any]:
    """An entry as plain values; a dtype loses its "torch."."""
    if not isinstance(entry, dict):
        return {"not a dict": str(type(entry).__name__)}
    shape = entry.get("shape")
    number = {name: entry.get(name) for name in ("elements", "bytes")}
    return {
        "shape": [int(length) for length in shape] if isinstance(shape, (list, tuple)) else str(shape),
        "dtype": str(entry.get("dtype")).split(".")[-1],
        **{name: int(value) if isinstance(value, (int, float)) else str(value) for name, value in number.items()},
    }


def sync(context: Context) -> dict[str, Any]:
    """sync_gradients in two iterations. Arguments: file, seed, shapes, frozen, without, dtype."""
    a = context.arguments
    task = context.load(a["file"])
    context.join()
    model, parameters = nn.Module(), []
    for number, value in enumerate(draws.gradients(a["seed"], context.rank, a["shapes"])):
        parameter = nn.Parameter(torch.zeros(value.shape), requires_grad=number not in a["frozen"])
        if number not in [*a["frozen"], *a["without"]]:
            parameter.grad = torch.from_numpy(value.copy())
        model.register_parameter(f"p{number}", parameter)
        parameters.append(parameter)
    model.register_parameter("tied", parameters[-1])
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    averaged: list[Any] = []
    for iteration in (1, 2):
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        context.event("iteration", number=iteration)
        task.sync_gradients(model, context.world_size, DTYPES[a["dtype"]], Watched(context))
        averaged = [parameter.grad for parameter in parameters]
    context.event("end")
    kept = [None if gradient is None else str(gradient.dtype).split(".")[-1] for gradient in averaged]
    return {"grads": [None if g is None else g.float() for g in averaged], "dtypes": kept}


def gradient_bytes(context: Context) -> float:
    """gradient_bytes of a model with a shared, a frozen and an unused tensor. Arguments: file, shapes, dtype."""
    a = context.arguments
    task = context.load(a["file"])
    model = nn.ModuleList([nn.Module(), nn.Module()])
    for number, shape in enumerate(a["shapes"]):
        parameter = nn.Parameter(torch.zeros(shape), requires_grad=number not in a["frozen"])
        if number not in [*a["frozen"], *a["without"]]:
            parameter.grad = torch.ones(shape)
        model[number % 2].register_parameter(f"p{number}", parameter)
        if number in a["tied"]:
            model[1 - number % 2].register_parameter(f"tied{number}", parameter)
    return float(task.gradient_bytes(model, DTYPES[a["dtype"]]))


def traffic(context: Context) -> list[list[float]]:
    """Bytes (sent, received) in each case. Arguments: file, function, cases (the function's arguments)."""
    task = context.load(context.arguments["file"])
    function = getattr(task, context.arguments["function"])
    return [pair(function(*case), context.arguments["function"]) for case in context.arguments["cases"]]


def iterations(context: Context) -> list[float]:
    """Iterations of an epoch in each case. Arguments: file, cases (examples, batch of one worker, workers)."""
    task = context.load(context.arguments["file"])
    return [float(task.iterations_per_epoch(*case)) for case in context.arguments["cases"]]


def epoch(context: Context) -> list[list[float]]:
    """Traffic of an epoch, and how many iterations the same file counts. Arguments: file, cases with traffic first."""
    task = context.load(context.arguments["file"])
    found = []
    for (sent, received), *case in context.arguments["cases"]:
        each = task.Traffic(sent, received)
        found.append(
            [*pair(task.traffic_per_epoch(each, *case), "traffic_per_epoch"), float(task.iterations_per_epoch(*case))]
        )
    return found


def pair(traffic: Any, function: str) -> list[float]:
    """(sent, received) of a Traffic, or of any two numbers; a crash that says so of anything else."""
    try:
        sent, received = traffic
        return [float(sent), float(received)]
    except (TypeError, ValueError):
        raise TypeError(f"{function} returned {traffic!r:.80}; expected Traffic(sent, received)") from None
