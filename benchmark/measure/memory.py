"""Bytes that live as long as training does, counted: every tensor that can be reached from the engine, each storage
once, right after a backward, when parameters, gradients and optimizer states are all there."""

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

SKIPPED = (type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float)


def counted(engine: Any) -> dict[str, int]:
    """Bytes of all tensors that `engine` reaches: {"parameters", "gradients", "rest", "total"}; rest is optimizer."""
    parameters = {_key(t) for p in engine.bare.parameters() for t in _tensors_of(p)}
    gradients = {_key(g) for p in engine.bare.parameters() if p.grad is not None for g in _tensors_of(p.grad)}
    sizes = {"parameters": 0, "gradients": 0, "rest": 0, "total": 0}
    for key, size in reachable(engine).items():
        name = "parameters" if key in parameters else "gradients" if key in gradients else "rest"
        sizes[name] += size
        sizes["total"] += size
    return sizes


def reachable(root: object) -> dict[tuple, int]:
    """Storages of all tensors reachable from `root` through objects and containers: (device, address) -> bytes."""
    storages: dict[tuple, int] = {}
    visited: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in visited or isinstance(thing, SKIPPED):
            continue
        visited.add(id(thing))
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
