"""FSDP2 (Zhao et al. 2023) behind the benchmark's Engine."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmark.engines.engine import HALF, Engine
from beyond.deferred import Deferred
from common.errors import InputError
from common.workers.process_group import Worker

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FSDP(Engine):
    """fully_shard: every parameter, gradient and optimizer state is cut by its first dimension over the workers."""

    autocasts = False

    def wrap(self, model: nn.Module) -> Any:
        half = HALF.get(self.settings.precision)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,))
        deferred = {name: p.deferred for name, p in model.named_parameters() if p.is_meta}
        for module in blocks(model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if deferred:
            materialise(model, deferred, self.worker)
        return model

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        self.model.set_requires_gradient_sync(last)
        return super().backward(loss, last)

    def full_parameters(self) -> dict[str, Tensor]:
        full: Any = get_model_state_dict(self.bare, options=FULL)  # a collective; {} on all but the first worker
        return full

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.bare, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.bare, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.bare, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def materialise(model: nn.Module, deferred: dict[str, Deferred], worker: Worker) -> None:
    """Give a sharded model without memory its shards, as FSDP2's users do, and fill them one parameter at a time."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=worker.device)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or name not in deferred:
            raise InputError(f"--model: fsdp cannot build {name} without memory; choose another strategy")
        rows = -(-parameter.shape[0] // worker.world_size)  # of a worker; the last ones have fewer
        row, own = parameter.numel() // parameter.shape[0], parameter.to_local().detach()
        begin = min(worker.rank * rows, parameter.shape[0]) * row
        whole = torch.empty(parameter.numel(), dtype=own.dtype)
        if own.numel():
            deferred[name].write(whole, begin, begin + own.numel())
            own.copy_(whole[begin : begin + own.numel()].view_as(own))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's layers: what is gathered, used and given up again as one piece."""
    named = ("GPT2Block", "T5Block", "GPT2BlockCustom")
    return [module for module in model.modules() if type(module).__name__ in named]
