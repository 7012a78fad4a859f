"""Bytes that live as long as training does: by the textbook, as the engine is known to keep them, and counted.

Counted means: every tensor that can be reached from the engine, each storage once, right after a backward, when
parameters, gradients and optimizer states are all there.

P parameters, N workers, fp32 with Adam. The textbook (Rajbhandari et al. 2020, ZeRO, section 3, for fp32): 4P for the
parameters, 4P for the gradients, 8P for the optimizer, each divided by N where it is sharded. DeepSpeed's stages 1 to 3
keep an fp32 master copy beside the parameters even if those are fp32 already.
"""

import gc
import math
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

WHOLE = 100_000  # stage3_param_persistence_threshold of configs/zero3*.json: parameters up to this size stay whole
BUCKET = 6_553_600  # reduce_bucket_size, elements: stage 3 keeps one for good
CUT = ("pipeline", "tensor", "own_tensor", "own_1f1b", "own_grid")  # strategies
SKIPPED = (type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float)


def textbook(strategy: str, parameters: int, workers: int) -> float:
    """Bytes per worker."""
    share = 1 / workers
    per_parameter = {
        "zero1": 8 + 8 * share,
        "zero2": 4 + 12 * share,
        "zero3": 16 * share,
        "fsdp": 16 * share,
        "pipeline": 16 * share,
        "tensor": 16 * share,
        "1f1b": 16 * share,
        "grid": 16 * share,
    }.get(strategy.removeprefix("own_").removesuffix("_offload"), 16.0)
    return per_parameter * parameters


def known(strategy: str, shapes: list[torch.Size], workers: int) -> float | None:
    """What the engine keeps on one worker (the first), from its documentation and sources; None where that depends on
    more than shapes: on the cut of a pipeline, and on which parameters of a layer are cut.

    shapes: of all parameters, each once. An offloaded optimizer keeps the gradients of its share once more, where it
    computes, and in stages 1 and 2 two buffers as large as the largest parameter on their way there.
    """
    sizes = [shape.numel() for shape in shapes]
    total, stage = sum(sizes), strategy.removesuffix("_offload")
    if stage.startswith(
        "own_zero"
    ):  # beyond/: in fp32 the shard is a view; a block is padded by less than a worker each
        return textbook(strategy, total, workers)
    if stage == "fsdp":  # rows are dealt out in equal numbers, the last worker's part is padded
        return 16 * sum(math.ceil(shape[0] / workers) * (shape.numel() // shape[0]) for shape in shapes)
    offloaded = strategy.endswith("_offload")
    if stage in ("zero1", "zero2"):
        more = 8 * max(sizes) if offloaded else 4 * _beyond_first_share(shapes, workers)
        return 4 * total + (20 if offloaded else 16) * total / workers + more
    if stage == "zero3":
        shards = sum(math.ceil(size / workers) for size in sizes)
        whole = sum(size for size in sizes if size <= WHOLE) if workers > 1 else 0
        return (24 if offloaded else 20) * shards + 4 * whole + 4 * BUCKET
    return None if stage in CUT else 16 * total


def _beyond_first_share(shapes: list[torch.Size], workers: int) -> int:
    """DeepSpeed cuts the weights (and apart from them biases and norms) into equal shares, through a parameter if need
    be, and keeps that one's gradient whole: how many of its elements belong to the second worker."""
    beyond = 0
    for group in ([s.numel() for s in shapes if len(s) > 1], [s.numel() for s in shapes if len(s) < 2]):
        end, position = math.ceil(sum(group) / workers), 0
        for size in group:
            position += size
            if position >= end:
                beyond += position - end
                break
    return beyond


def counted(engine: Any) -> dict[str, int]:
    """Bytes of all tensors that `engine` reaches: {"parameters", "gradients", "rest", "total"}; rest is optimizer."""
    parameters = {_key(t) for p in engine.bare.parameters() for t in _tensors_of(p)}
    gradients = {_key(g) for p in engine.bare.parameters() if p.grad is not None for g in _tensors_of(p.grad)}
    found = {"parameters": 0, "gradients": 0, "rest": 0, "total": 0}
    for key, size in reachable(engine).items():
        name = "parameters" if key in parameters else "gradients" if key in gradients else "rest"
        found[name] += size
        found["total"] += size
    return found


def reachable(root: object) -> dict[tuple, int]:
    """Storages of all tensors reachable from `root` through objects and containers: (device, address) -> bytes."""
    storages: dict[tuple, int] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, SKIPPED):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            for tensor in _tensors_of(thing):
                if tensor.untyped_storage().nbytes():
                    storages[_key(tensor)] = tensor.untyped_storage().nbytes()
            todo += [thing.grad] if thing.is_leaf and thing.grad is not None else []
            todo += list(getattr(thing, "__dict__", {}).values())
        elif isinstance(thing, MethodType):
            continue  # hooks lead to other engines
        else:
            todo += gc.get_referents(thing)
    return storages


def _tensors_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors behind one: the local part of a DTensor, the shard of a parameter of DeepSpeed's stage 3."""
    local = getattr(tensor, "_local_tensor", tensor)
    shard = getattr(tensor, "ds_tensor", None)
    return [local] if shard is None else [local, shard]


def _key(tensor: Tensor) -> tuple:
    return (str(tensor.device), tensor.untyped_storage().data_ptr())
