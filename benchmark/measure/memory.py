"""Bytes that live as long as training does, counted: every tensor that can be reached from the engine, each storage
once, right after a backward, when parameters, gradients and optimizer states are all there."""

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from torch import Tensor

SKIPPED = (type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float)


def counted(engine: object) -> int:
    """Bytes of the storages of all tensors that are reachable from `engine` through objects and containers."""
    storages: dict[tuple, int] = {}  # (device, address) -> bytes
    visited: set[int] = set()
    todo = [engine]
    while todo:
        thing = todo.pop()
        if id(thing) in visited or isinstance(thing, SKIPPED):
            continue
        visited.add(id(thing))
        if isinstance(thing, Tensor):
            for tensor in _tensors_of(thing):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    storages[str(tensor.device), storage.data_ptr()] = storage.nbytes()
            todo += [thing.grad] if thing.is_leaf and thing.grad is not None else []
            todo += list(getattr(thing, "__dict__", {}).values())
        elif isinstance(thing, MethodType):
            continue  # hooks lead to other engines
        else:
            todo += gc.get_referents(thing)
    return sum(storages.values())


def _tensors_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors behind one: the local part of a DTensor, the shard of a parameter of DeepSpeed's stage 3."""
    local = getattr(tensor, "_local_tensor", tensor)
    shard = getattr(tensor, "ds_tensor", None)
    return [local] if shard is None else [local, shard]
