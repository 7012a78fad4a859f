"""Runs a student's Pipe: compute alone, and whole; forward alone is in probes.pipeline.forward."""

import contextlib
import functools
import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from grader.inside.context import Context
from grader.probes.pipeline.permits import Permits
from grader.probes.pipeline.watched import NeverArrives, Watch, WatchedStage, watch_queues, work_of
from grader.wire.values import Fields


class GivenSplit:
    """Stands for _split_module: the partitions are cut already."""

    def __init__(self, stages: list[nn.Module], devices: list[str]) -> None:
        self.parts = [nn.Sequential(stage) for stage in stages], [torch.device(device) for device in devices]

    def split_module(self, modules: nn.Sequential) -> tuple[list[nn.Sequential], list[torch.device]]:
        return self.parts


@contextlib.contextmanager
def replaced(owner: object, name: str, stand_in: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, stand_in)
    yield
    setattr(owner, name, before)


def make_pipe(module: ModuleType, stages: list[nn.Module], split_size: int, devices: list[str] | None = None) -> Any:
    """A student's Pipe of these stages, without the student's _split_module."""
    given = GivenSplit(stages, devices or [f"cpu:{j}" for j in range(len(stages))])
    with replaced(module, "_split_module", given.split_module):
        return module.Pipe(nn.Sequential(*stages), split_size)


class Trouble(Exception):  # noqa: N818 (a name that no student raises by chance)
    """What goes wrong in a partition of the grader's."""


def _stage_function(j: int, reshape: bool) -> Any:
    """x -> x * (j + 2); with `reshape` this and three times this, (B, ...) -> (B, ..., 2)."""

    def deeper(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * (j + 2), x * 3 * (j + 2)], dim=-1)

    return deeper if reshape else functools.partial(torch.mul, other=j + 2)


def compute(context: Context) -> Fields:
    """Calls of Pipe.compute on one pipe, with all queues watched; partition j turns x into x * (j + 2).

    Arguments: file, mine (batches), cycles (pairs of each call), devices; meet (no partition returns before all of the
    cycle work), patience (seconds until they give up), slow (see Watch), reshape (results have another shape), trouble
    (the partition that raises, or -1), words (what it raises). Where partitions meet they ask for permits.
    """
    a = context.arguments
    module = context.load(a["file"])
    watch = Watch(context.event, a["patience"], a["slow"], Permits(context.ask) if a["meet"] else None)
    stages: list[nn.Module] = [
        WatchedStage(watch, j, work_of(watch, _stage_function(j, a["reshape"]))) for j in range(len(a["devices"]))
    ]
    if a["meet"]:
        watch.expect(*a["cycles"])
    before = set(threading.enumerate())
    pipe = make_pipe(module, stages, 1, a["devices"])
    watch_queues(pipe, watch)
    given = [batch.clone().requires_grad_() for batch in a["mine"]]
    batches = list(given)
    if a["trouble"] >= 0:
        told = _raises(pipe, stages[a["trouble"]], batches, a)
        del pipe, stages, watch
        return told | {"left": _threads_left(before, a["patience"])}
    changed = False
    try:
        for pairs in a["cycles"]:
            context.event("cycle")
            schedule = [(i, j) for i, j in pairs]
            pipe.compute(batches, schedule)
            changed |= schedule != [(i, j) for i, j in pairs] or len(batches) != len(given)
    except NeverArrives:
        return {"waits_forever": True}
    return {
        "batches": [batch if _on_cpu(batch) else None for batch in batches],
        "devices": [str(batch.device) if isinstance(batch, torch.Tensor) else "" for batch in batches],
        "kinds": [type(batch).__name__[:60] for batch in batches],
        "gradients": _gradients(given, batches),
        "schedule_changed": changed,
    }


def _on_cpu(batch: object) -> bool:
    """Whether it is a tensor with values: without a look at success, what a worker raised becomes a micro-batch."""
    return isinstance(batch, torch.Tensor) and batch.device.type != "meta"


def _gradients(given: list[torch.Tensor], batches: list[Any]) -> list[Any]:
    """The gradient of each stored result's sum with respect to its micro-batch; None where the graph is cut."""
    for last in batches[: len(given)]:
        if _on_cpu(last) and last.requires_grad:
            last.sum().backward()
    return [batch.grad for batch in given]


def _raises(pipe: Any, stage: Any, batches: list, a: dict) -> Fields:
    """compute() with a partition that raises: what the caller gets to see. A crash before that is a crash."""
    error = stage.error = Trouble(a["words"])
    caught = None
    try:
        pipe.compute(batches, [(i, j) for i, j in a["cycles"][0]])
    except NeverArrives:
        return {"waits_forever": True}
    except BaseException as raised:
        if not stage.calls:
            raise
        frames = [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
        caught = {
            "same": raised is error, "type": type(raised).__name__[:60], "words": str(raised)[:200],
            "in_layer": "forward" in frames,
        }  # fmt: skip
    error.__traceback__ = None  # it holds all frames, and they hold the pipe
    return {"caught": caught, "entered": stage.calls}


def _threads_left(before: set[threading.Thread], patience: float) -> int:
    """How many threads of the pipe outlive it."""
    limit = time.monotonic() + patience
    while True:
        gc.collect()
        left = [thread for thread in threading.enumerate() if thread not in before]
        if not left or time.monotonic() > limit:
            return len(left)
        left[0].join(0.05)


def pipe(context: Context) -> list[Any] | Fields:
    """A whole Pipe of the student's, called with each batch in turn, then backward through the weighted output.

    Arguments: file, mine (weights and biases of each stage, batches and loss_weights), split_size; meet, patience,
    head (whether the last stage drops the marks and returns (B,)). Where stages meet they ask for permits.
    A stage returns its first column unchanged, which marks the example, and applies tanh(W x + b) to the others.
    """
    a = context.arguments
    module = context.load(a["file"])
    from pipeline.partition import WithDevice

    mine = a["mine"]
    layers = [_Layer(weight, bias) for weight, bias in zip(mine["weights"], mine["biases"], strict=True)]
    layers[-1].sums = a["head"]
    watch = Watch(context.event, a["patience"], permits=Permits(context.ask) if a["meet"] else None)
    works = [work_of(watch, layer.computes(), _scaled_but_marks) for layer in layers]
    stages = [WatchedStage(watch, j, *of_stage) for j, of_stage in enumerate(zip(works, layers, strict=True))]
    labelled = nn.Sequential(*(WithDevice(stage, f"cpu:{j}") for j, stage in enumerate(stages)))
    watch.expect(*a["meet"])
    made = module.Pipe(labelled, a["split_size"])
    watch_queues(made, watch)
    results: list[Any] = []
    try:
        for x, loss_weight in zip(mine["batches"], mine["loss_weights"], strict=True):
            results.append(_step(context, made, layers, x.clone().requires_grad_(), loss_weight, watch))
    except NeverArrives:
        return {"waits_forever": True}
    return results


def _scaled_but_marks(x: torch.Tensor, permit: float) -> torch.Tensor:
    return torch.cat([x[:, :1], x[:, 1:] * permit], dim=1)


def _step(
    context: Context, made: Any, layers: list[Any], x: torch.Tensor, loss_weight: torch.Tensor, watch: Watch
) -> dict:
    """One call with gradients, and where it went well and needs no permits one without."""
    made.zero_grad()
    context.during = "calling the pipe"
    output = made(x)
    context.during = "the backward pass"
    if output.shape != loss_weight.shape:
        return {"output": output, "gradients": {}, "without_grad": False}
    (output * loss_weight).sum().backward()
    gradients = {"x": x.grad}
    for j, layer in enumerate(layers):
        gradients |= {f"stage {j} weight": layer.weight.grad, f"stage {j} bias": layer.bias.grad}
    if watch.permits:
        return {"output": output, "gradients": gradients, "without_grad": False}
    with torch.no_grad():
        return {"output": output, "gradients": gradients, "without_grad": made(x).requires_grad}


class _Layer(nn.Module):
    """(B, 1 + D) -> (B, 1 + D): column 0 unchanged, tanh(W x + b) of the others. With `sums` (B,): the sum of those."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.sums = False

    def computes(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What it computes, without a look at attributes that may have changed."""
        weight, bias, sums, tanh, cat = self.weight, self.bias, self.sums, torch.tanh, torch.cat

        def compute(x: torch.Tensor) -> torch.Tensor:
            mark, features = x[:, :1], x[:, 1:]
            hidden = tanh(features @ weight.T + bias)
            return hidden.sum(1) if sums else cat([mark, hidden], dim=1)

        return compute
