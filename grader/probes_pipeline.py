"""Runs a student's split, schedule and Pipe, each alone as far as it can be: the neighbours' regions are replaced."""

import contextlib
import functools
import gc
import itertools
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from grader.probes import Context
from grader.stations import Hall, Station, watch_queues

ENOUGH = 30  # clock cycles beyond those that a schedule may have, before an endless one is cut off


def split(context: Context) -> list[Any]:
    """_split_module of several models. Arguments: file, models (lists of layers, see _build)."""
    module = context.load(context.arguments["file"])
    told: list[Any] = []
    for number, layers in enumerate(context.arguments["models"]):
        leaves: list[nn.Module] = []
        modules = nn.Sequential(*(_build(layer, leaves, module.WithDevice) for layer in layers))
        context.during = f"_split_module of model {number}"
        result = module._split_module(modules)
        if not isinstance(result, tuple | list) or len(result) != 2 or type(result[0]) is nn.Sequential:
            told.append(f"a {type(result).__name__}")
            continue
        partitions = [[type(partition).__name__, *_which(partition, leaves)] for partition in result[0]]
        told.append({"partitions": partitions, "devices": [str(device) for device in result[1]]})
    return told


def _build(layer: dict, leaves: list[nn.Module], label: Any) -> nn.Module:
    """A layer as the grader wrote it: `layers` inside it, or `on` (where its parameters lie, "" for none); `label`."""
    module: nn.Module
    if "layers" in layer:
        module = nn.Sequential(*(_build(inner, leaves, label) for inner in layer["layers"]))
    else:
        module = nn.Linear(2, 2, device=layer["on"]) if layer["on"] else nn.ReLU()
        leaves.append(module)
    return label(module, layer["label"]) if layer["label"] else module


def _which(partition: Any, leaves: list[nn.Module]) -> list[Any]:
    """The numbers of the layers in a partition; the type of what is none of them."""
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    return [numbers.get(id(module), type(module).__name__) for module in partition]


def schedule(context: Context) -> list[Any]:
    """_clock_cycles for several sizes. Arguments: file, sizes (micro-batches, partitions)."""
    module = context.load(context.arguments["file"])
    told: list[Any] = []
    for m, n in context.arguments["sizes"]:
        context.during = f"_clock_cycles({m}, {n})"
        cycles = module._clock_cycles(m, n)
        if not hasattr(cycles, "__iter__"):
            told.append(f"a {type(cycles).__name__}")
            continue
        told.append([_pairs(cycle) for cycle in itertools.islice(cycles, m + n + ENOUGH)])
    return told


def _pairs(cycle: Any) -> Any:
    try:
        return [[int(micro_batch), int(partition)] for micro_batch, partition in cycle]
    except (TypeError, ValueError):
        return repr(cycle)[:80]


@contextlib.contextmanager
def given_split(module: ModuleType, stages: list[nn.Module], devices: list[str]) -> Iterator[None]:
    """Within it, Pipe finds its partitions already cut, whatever _split_module does."""
    before = module._split_module
    parts = [nn.Sequential(stage) for stage in stages], [torch.device(device) for device in devices]
    module._split_module = lambda *_: parts  # type: ignore[attr-defined]
    yield
    module._split_module = before  # type: ignore[attr-defined]


def make_pipe(module: ModuleType, stages: list[nn.Module], split_size: int, devices: list[str] | None = None) -> Any:
    """A student's Pipe of these stages, without the student's _split_module."""
    with given_split(module, stages, devices or [f"cpu:{j}" for j in range(len(stages))]):
        return module.Pipe(nn.Sequential(*stages), split_size)


def forward(context: Context) -> list[Any]:
    """Pipe.forward with a compute() and a schedule of ours: partition j turns x into 2 x + j.

    Arguments: file, stages, split_size, batches (one call for each), last (the device of the results). What is
    returned: for each call the sizes and pairs that compute was given, what the schedule was asked for, the output.
    """
    a = context.arguments
    module = context.load(a["file"])
    devices = [*(f"cpu:{j}" for j in range(a["stages"] - 1)), a["last"]]
    pipe = make_pipe(module, [nn.Identity() for _ in devices], a["split_size"], devices)
    told: list[Any] = []

    def cycles(micro_batches: int, partitions: int) -> Iterator[list[tuple[int, int]]]:
        told[-1]["asked"].append([int(micro_batches), int(partitions)])
        for partition in range(partitions):  # in the order of no pipeline, but a legal one
            yield [(micro_batch, partition) for micro_batch in range(micro_batches)]

    def compute(batches: Any, pairs: Any) -> None:
        pairs = [(int(i), int(j)) for i, j in pairs]
        told[-1]["calls"].append({"sizes": [len(batch) for batch in batches], "pairs": pairs})
        for i, j in pairs:
            if 0 <= i < len(batches):
                batches[i] = (2 * batches[i] + j).to(a["last"])

    module._clock_cycles, pipe.compute = cycles, compute  # type: ignore[attr-defined]
    for x in _tensors(a["batches"]):
        told.append({"asked": [], "calls": [], "moved": False, "changed": False, "output": None})
        mine = x.clone()
        try:
            output = pipe.forward(mine)
        except NotImplementedError as error:
            if "meta" not in str(error):
                raise
            told[-1]["moved"] = True  # what lies on the device "meta" cannot be copied away from it
            continue
        if isinstance(output, torch.Tensor):
            on_meta = output.device.type == "meta"
            told[-1]["output"] = torch.zeros(output.shape) if on_meta else output
        told[-1]["changed"] = not torch.equal(mine, x)
    return told


def compute(context: Context) -> dict[str, Any]:
    """One call of Pipe.compute with all queues watched; partition j turns x into x * (j + 2).

    Arguments: file, batches, pairs, devices; meet (nobody leaves a partition before all of the cycle are inside),
    patience (seconds until they give up), trouble (the partition that raises, or -1).
    """
    a = context.arguments
    module = context.load(a["file"])
    hall = Hall(context, a["patience"])
    stages: list[nn.Module] = [
        Station(hall, j, functools.partial(torch.mul, other=j + 2)) for j in range(len(a["devices"]))
    ]
    if a["meet"]:
        hall.expect([[*pair] for pair in a["pairs"]])
    before = set(threading.enumerate())
    pipe = make_pipe(module, stages, 1, a["devices"])
    watch_queues(pipe, hall, at_once=True)
    batches, error = _tensors(a["batches"]), RuntimeError("never raised")
    if a["trouble"] >= 0:
        error = stages[a["trouble"]].error = Trouble(a["words"])  # type: ignore[assignment]
    caught = None
    try:
        pipe.compute(batches, [tuple(pair) for pair in a["pairs"]])
    except BaseException as raised:
        if a["trouble"] < 0:
            raise
        frames = [frame.name for frame in _frames(raised)]
        caught = {"same": raised is error, "type": type(raised).__name__, "words": str(raised), "frames": frames}
    # Not only tensors: without a look at success, what a worker raised becomes a micro-batch.
    kept = [isinstance(batch, torch.Tensor) and batch.device.type != "meta" for batch in batches]
    told = {
        "batches": [batch if here else None for batch, here in zip(batches, kept, strict=True)],
        "devices": [str(getattr(batch, "device", type(batch).__name__)) for batch in batches],
        "caught": caught,
    }
    error.__traceback__ = None  # it holds all frames, and they hold the pipe
    del pipe, stages, hall
    return told | {"left": _threads_left(before, a["patience"])}


class Trouble(Exception):  # noqa: N818 (a name that no student raises by chance)
    """What goes wrong in a partition of the grader's."""


def _frames(error: BaseException) -> list[Any]:
    import traceback

    return traceback.extract_tb(error.__traceback__)


def _threads_left(before: set[threading.Thread], patience: float) -> int:
    """How many threads of the pipe outlive it."""
    limit = time.monotonic() + patience
    while True:
        gc.collect()
        left = [thread for thread in threading.enumerate() if thread not in before]
        if not left or time.monotonic() > limit:
            return len(left)
        left[0].join(0.05)


def pipe(context: Context) -> list[Any]:
    """A whole Pipe of the student's, called with each batch in turn, then backward through the weighted output.

    Arguments: file, weights and biases (of each stage), split_size, batches, loss_weights (one each); meet, patience.
    A stage hands its first column on as it is, which marks the example, and applies tanh(W x + b) to the others.
    """
    a = context.arguments
    module = context.load(a["file"])
    from pipeline.partition import WithDevice

    hall = Hall(context, a["patience"])
    layers = [_Layer(weight, bias) for weight, bias in zip(*map(_tensors, (a["weights"], a["biases"])), strict=True)]
    stations = [Station(hall, j, layer) for j, layer in enumerate(layers)]
    labelled = nn.Sequential(*(WithDevice(station, f"cpu:{j}") for j, station in enumerate(stations)))
    hall.expect(*a["meet"])
    made = module.Pipe(labelled, a["split_size"])
    watch_queues(made, hall)
    told = []
    for x, loss_weight in zip(*map(_tensors, (a["batches"], a["loss_weights"])), strict=True):
        made.zero_grad()
        x.requires_grad_()
        context.during = "calling the pipe"
        output = made(x)
        context.during = "the backward pass"
        if output.shape != loss_weight.shape:
            told.append({"output": output, "gradients": {}, "without_grad": False})
            continue
        (output * loss_weight).sum().backward()
        gradients = {"x": x.grad}
        for j, layer in enumerate(layers):
            gradients |= {f"stage {j} weight": layer.weight.grad, f"stage {j} bias": layer.bias.grad}
        told.append({"output": output, "gradients": gradients})
        with torch.no_grad():
            told[-1]["without_grad"] = made(x).requires_grad
    return told


def _tensors(rows: list) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


class _Layer(nn.Module):
    """(B, 1 + D) -> (B, 1 + D): the first column as it is, tanh(W x + b) of the others."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mark, features = x[:, :1], x[:, 1:]
        return torch.cat([mark, torch.tanh(features @ self.weight.T + self.bias)], dim=1)
