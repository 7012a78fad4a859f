"""Runs task 4's functions: the sync that writes down what it sends, and the expectations, each alone."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from grader.inside.context import Context
from grader.wire import drawn
from grader.wire.values import Fields

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST = 200  # entries that are looked at


def plain(entry: object) -> Fields:
    """An entry as plain values; a dtype loses its "torch."."""
    if not isinstance(entry, dict):
        return {"not a dict": str(type(entry).__name__)}
    shape = entry.get("shape")
    number = {name: entry.get(name) for name in ("elements", "bytes")}
    return {
        "shape": [int(length) for length in shape] if isinstance(shape, (list, tuple)) else str(shape)[:80],
        "dtype": str(entry.get("dtype")).split(".")[-1],
        **{name: int(value) if isinstance(value, (int, float)) else str(value)[:80] for name, value in number.items()},
    }


def sync(context: Context) -> Fields:
    """sync_gradients, once for each iteration's gradients.

    Arguments: file, mine (iteration -> this rank's gradients), shapes, frozen, without, dtype. Returns by iteration
    `sent` (the list afterwards) and `grads`; `dtypes` of the last gradients; `moved`: whether a parameter changed.
    """
    a = context.arguments
    sent: list[Any] = []
    for module in (dist, distributed_c10d):
        context.spy(module, "all_reduce", "entries", lambda *_, **__: {"count": len(sent)})
    task = context.load(a["file"])
    context.join()
    model, parameters, weight = nn.Module(), [], drawn.weight(context.rank)
    for number, shape in enumerate(a["shapes"]):
        parameter = nn.Parameter(torch.full(shape, weight), requires_grad=number not in a["frozen"])
        model.register_parameter(f"p{number}", parameter)
        parameters.append(parameter)
    model.register_parameter("tied", parameters[-1])
    found: dict[str, list] = {"sent": [], "grads": []}
    for iteration, gradients in enumerate(a["mine"], 1):
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None if number in [*a["frozen"], *a["without"]] else gradient.clone()
        sent.clear()
        context.event("iteration", number=iteration)
        task.sync_gradients(model, context.world_size, DTYPES[a["dtype"]], sent)
        found["sent"].append([plain(entry) for entry in sent[:MOST]])
        averaged = [parameter.grad for parameter in parameters]
        found["grads"].append([None if grad is None else grad.detach().float().clone() for grad in averaged])
    kept = [None if grad is None else str(grad.dtype).split(".")[-1] for grad in averaged]
    moved = not all(bool((parameter == weight).all()) for parameter in parameters)
    return {**found, "dtypes": kept, "moved": moved}


def gradient_bytes(context: Context) -> list[float]:
    """gradient_bytes of a model with a shared, a frozen and an unused tensor. Arguments: file, shapes, dtypes."""
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
    return [float(task.gradient_bytes(model, DTYPES[dtype])) for dtype in a["dtypes"]]


def traffic(context: Context) -> list[list[float]]:
    """Bytes (sent, received) in each case. Arguments: file, function, cases (the function's arguments)."""
    task = context.load(context.arguments["file"])
    function = context.arguments["function"]
    return [pair(getattr(task, function)(*case), function) for case in context.arguments["cases"]]


def iterations(context: Context) -> list[float]:
    """Iterations of an epoch in each case. Arguments: file, cases (examples, batch of one worker, workers)."""
    task = context.load(context.arguments["file"])
    return [float(task.iterations_per_epoch(*case)) for case in context.arguments["cases"]]


def epoch(context: Context) -> list[list[float]]:
    """Traffic of an epoch. Arguments: file, cases with traffic first."""
    task = context.load(context.arguments["file"])
    found = []
    for (sent, received), *case in context.arguments["cases"]:
        found.append(pair(task.traffic_per_epoch(task.Traffic(sent, received), *case), "traffic_per_epoch"))
    return found


def pair(traffic: Any, function: str) -> list[float]:
    """(sent, received) of a Traffic; anything else fails here, since other functions ask for .sent and .received."""
    try:
        return [float(traffic.sent), float(traffic.received)]
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"{function} returned {traffic!r:.80}; expected Traffic(sent, received)") from None
