"""FSDP2 (Zhao et al. 2023) behind the benchmark's Engine."""

import warnings
from pathlib import Path

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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmark.engines.engine import HALF, Engine
from benchmark.training.own_model import blocks
from beyond.deferred import Deferred
from common.workers.process_group import Worker

# An in-place operation on the output of a user's layer would be wrong; the proof sees that.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FSDP(Engine):
    """fully_shard: every parameter, gradient and optimizer state is cut by its first dimension over the workers."""

    autocasts = False

    def wrap(self, model: nn.Module) -> nn.Module:
        half = HALF.get(self.settings.precision)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,))
        on_meta = {name: p for name, p in model.named_parameters() if p.is_meta}
        deferred = {name: p.deferred for name, p in on_meta.items()}  # type: ignore[attr-defined]
        for module in blocks(model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if deferred:
            materialise(model, deferred, self.worker)
        return model

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return super().backward(loss, last)

    def sent_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.float32, HALF.get(self.settings.precision, torch.float32)  # wrap's policy

    def full_parameters(self) -> dict[str, Tensor]:
        full: dict = get_model_state_dict(self.bare, options=FULL)  # a collective; {} on all but the first worker
        return full

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.bare, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.bare, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.bare, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


@torch.no_grad()
def materialise(model: nn.Module, deferred: dict[str, Deferred], worker: Worker) -> None:
    """Give a sharded model its memory, as FSDP2's users do, and fill the shards one parameter at a time."""
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: local(tensor).clone() for name, tensor in whole.items() if name not in deferred}
    model.to_empty(device=worker.device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own = local(tensor)
        if name in kept:
            own.copy_(kept[name])
        elif own.numel():
            row = tensor.numel() // tensor.shape[0]
            begin = worker.rank * -(-tensor.shape[0] // worker.world_size) * row  # equal numbers of rows, in order
            flat = torch.empty(tensor.numel(), dtype=own.dtype)
            deferred[name].write(flat, begin, begin + own.numel())
            own.copy_(flat[begin : begin + own.numel()].view_as(own))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
