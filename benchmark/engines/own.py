"""The bonus lessons as strategies: the solved files in beyond/.

own_ring averages all gradients after backward, own_overlap bucket by bucket during backward. own_zero1, own_zero2 and
own_zero3 shard what ZeRO's stages shard. With --precision bf16 their model is bf16 and the shards are fp32.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmark.engines.engine import HALF, Engine, optimizer_class
from benchmark.training.own_model import blocks
from beyond.checkpoint import load_shards, save_shards
from beyond.overlap import GradientReducer
from beyond.ring import average_gradients
from beyond.sharded_model import ShardedModel
from beyond.sharded_optimizer import ShardedOptimizer


class OwnRing(Engine):
    """Each worker holds all; an all_reduce of send and recv sums all gradients when the last one is there."""

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        value = super().backward(loss, last)
        if last:
            average_gradients(self.bare)
        return value

    def unrecorded_bytes(self) -> float:
        return self.ring_bytes()  # the flight recorder has no entry for gloo's point to point


class OwnOverlap(Engine):
    """Each worker holds all; gradients are summed by all_reduce, bucket by bucket, while backward still runs."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.reducer = GradientReducer(model, int(self.settings.bucket_mb * 2**20))
        return model

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        with contextlib.nullcontext() if last else self.reducer.no_sync():
            value = super().backward(loss, last)
        if last:
            self.reducer.finish()
        return value


class OwnSharded(Engine):
    """What the three stages share: the lesson's object has the optimizer, clips, and steps."""

    autocasts = False
    # shard gives the lesson's object for (model, blocks, make_optimizer, weight_decay); sharded is this object.
    shard: Callable[..., ShardedOptimizer | ShardedModel]
    sharded: ShardedOptimizer | ShardedModel

    def wrap(self, model: nn.Module) -> nn.Module:
        settings = self.settings
        if settings.precision != "fp32":
            model = model.to(HALF[settings.precision])
        self.sharded = self.shard(model, blocks(model), optimizer_class(settings), settings.weight_decay)
        return model

    def make_optimizer(self) -> Optimizer:
        return self.sharded.optimizer

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        value = super().backward(loss, last)
        self.sharded.finish()
        return value

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.settings.max_grad_norm:
            self.norm = self.clip(self.settings.max_grad_norm)
        self.sharded.step()
        self.sharded.zero_grad()

    def clip(self, norm: float) -> Tensor:
        clipped: Tensor = self.sharded.clip(norm)
        return clipped

    def sent_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        half = HALF.get(self.settings.precision, torch.float32)
        return half, half

    def full_parameters(self) -> dict[str, Tensor]:
        """The shards' fp32 values, which are more exact than a half-precision model's."""
        names = {id(parameter): name for name, parameter in self.bare.named_parameters()}
        full = {name: p.detach().cpu() for name, p in self.bare.named_parameters() if not p.requires_grad}
        for piece in self.sharded.pieces:
            whole = piece.shard.values.new_empty(self.worker.world_size * piece.flat.shard_length)
            dist.all_gather_single(whole, piece.shard.values.detach())
            for parameter, value in zip(piece.flat.parameters, piece.flat.pieces(whole), strict=True):
                full[names[id(parameter)]] = value.cpu()
        return full if self.worker.is_first else {}

    def save(self, folder: Path) -> None:
        save_shards(folder, self.sharded)  # type: ignore[arg-type]  # its pieces are a list

    def load(self, folder: Path) -> None:
        load_shards(folder, self.sharded)  # type: ignore[arg-type]


class OwnZero1(OwnSharded):
    """The state of the optimizer is sharded; gradients go to the owner of their shard when the step begins."""

    shard = staticmethod(partial(ShardedOptimizer, stage=1))

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        return Engine.backward(self, loss, last)  # gradients stay and add up until the step

    def step(self, rate: float) -> None:
        self.sharded.finish()
        super().step(rate)


class OwnZero2(OwnSharded):
    """State and gradients are sharded; gradients leave during backward, block by block."""

    shard = staticmethod(partial(ShardedOptimizer, stage=2))


class OwnZero3(OwnSharded):
    """State, gradients and parameters are sharded; a block's parameters are gathered before it computes."""

    shard = ShardedModel

    def copies(self, full: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield from ()  # every worker has its own shards
