"""The strategies: how a model and its optimizer are spread over the workers. The loop is the same for all of them.

    engine = STRATEGIES["fsdp"](settings, worker, model)
    loss = engine.forward(batch); engine.backward(loss, last=True); engine.step(rate)

Adding one: a function (or class) that makes an Engine, and a line in STRATEGIES. What a strategy cannot do on this
machine is said by why_not in one line, before any worker joins.
"""

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable
from functools import partial
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
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmark.workload import summary, validation_sums
from common.optim import weight_decay_groups
from common.workers.process_group import Worker

# FSDP and DeepSpeed call collectives by their old names; thousands of lines would hide the one that matters.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)

BETAS = (0.9, 0.999)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Engine:
    """One worker alone: model, AdamW, clipping. The others change what they do differently, and nothing else."""

    autocasts = True  # half precision by autocast: weights stay fp32, operations choose

    def __init__(self, settings: Any, worker: Worker, model: nn.Module) -> None:
        self.settings, self.worker = settings, worker
        self.bare = model.to(worker.device)
        self.model: Any = self.wrap(self.bare)
        self.optimizer: Any = self.make_optimizer()
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=settings.precision == "fp16")

    def wrap(self, model: nn.Module) -> Any:
        return model

    def make_optimizer(self) -> Any:
        groups = weight_decay_groups(self.model, self.settings.weight_decay)
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, eps=self.settings.adam_epsilon, betas=BETAS)

    def half(self) -> contextlib.AbstractContextManager:
        half = HALF.get(self.settings.precision)
        enabled = half is not None and self.autocasts
        return torch.autocast(self.worker.device.type, dtype=half, enabled=enabled)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with self.half():
            return self.model(**batch).loss

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        """Gradients of a micro-batch; with the `last` one of a step they are averaged over the workers. The loss."""
        self.scaler.scale(loss / self.settings.accumulation).backward()
        return loss.detach()

    def step(self, rate: float) -> None:
        """Clip, update at learning rate `rate`, forget the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.settings.max_grad_norm:
            self.scaler.unscale_(self.optimizer)
            self.clip(self.settings.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def clip(self, norm: float) -> None:
        clip_grad_norm_(self.bare.parameters(), norm)

    def validate(self, batches: Iterable[dict[str, Tensor]], kind: str) -> dict[str, float]:
        """Loss, perplexity and accuracy; every worker validates on the same batches."""
        self.model.eval()
        total, right, tokens = 0.0, 0, 0
        with torch.no_grad(), self.half():
            for batch in self.worker.batches(batches):
                found = validation_sums(self.validated()(**batch).logits, batch, kind)
                total, right, tokens = total + found[0], right + found[1], tokens + found[2]
        self.model.train()
        return summary(total, right, tokens)

    def validated(self) -> nn.Module:
        return self.model

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters by the model's own names, gathered on the first worker's CPU; {} on the others."""
        return {name: p.detach().cpu() for name, p in self.bare.named_parameters()} if self.worker.is_first else {}

    def unrecorded_bytes(self) -> float:
        """Bytes a worker sends in a step that torch's flight recorder does not see (mean over the workers)."""
        return 0.0

    def save(self, folder: Path) -> None:
        """This worker's part of a checkpoint, into a folder that all workers share."""
        state = {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.worker.is_first:  # all workers hold the same
            torch.save(state | {"scaler": self.scaler.state_dict()}, folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", map_location=self.worker.device)
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


class DP(Engine):
    """nn.DataParallel: one process, which copies the model to every GPU in every forward."""

    def wrap(self, model: nn.Module) -> Any:
        return DataParallel(model)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch).mean()  # one loss of every GPU


class DDP(Engine):
    """Each worker holds all; gradients are summed by all_reduce, bucket by bucket, while backward goes on."""

    def wrap(self, model: nn.Module) -> Any:
        device_ids = [self.worker.device.index] if self.worker.device.type == "cuda" else None
        # The gradients lie in the buckets: without this DDP keeps them twice.
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    micro_batches = 0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        # DDP decides in forward whether the backward will communicate: with a step's last micro-batch only.
        self.micro_batches += 1
        last = self.micro_batches % self.settings.accumulation == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            return super().forward(batch)

    def validated(self) -> nn.Module:
        return self.bare  # nothing to exchange


class FSDP(Engine):
    """fully_shard: every parameter, gradient and optimizer state is cut by its first dimension over the workers."""

    autocasts = False

    def wrap(self, model: nn.Module) -> Any:
        half = HALF.get(self.settings.precision)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,))
        for module in blocks(model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

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


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's layers: what is gathered, used and given up again as one piece."""
    named = ("GPT2Block", "T5Block", "GPT2BlockCustom")
    return [module for module in model.modules() if type(module).__name__ in named]


def make_deepspeed(stage: int, offload: bool, settings: Any, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines.deepspeed import DeepSpeed  # the import takes seconds

    return DeepSpeed(stage, offload, settings, worker, model)


def make_pipeline(settings: Any, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines.pipeline import Pipeline

    return Pipeline(settings, worker, model)


def make_own(engine: str, settings: Any, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines import own  # it builds on this file

    made: Engine = getattr(own, engine)(settings, worker, model)
    return made


STRATEGIES: dict[str, Callable[[Any, Worker, nn.Module], Engine]] = {
    "single": Engine,
    "dp": DP,
    "ddp": DDP,
    "fsdp": FSDP,
    "zero0": partial(make_deepspeed, 0, False),
    "zero1": partial(make_deepspeed, 1, False),
    "zero2": partial(make_deepspeed, 2, False),
    "zero3": partial(make_deepspeed, 3, False),
    "zero1_offload": partial(make_deepspeed, 1, True),
    "zero2_offload": partial(make_deepspeed, 2, True),
    "zero3_offload": partial(make_deepspeed, 3, True),
    "pipeline": make_pipeline,
    "own_ring": partial(make_own, "OwnRing"),
    "own_overlap": partial(make_own, "OwnOverlap"),
}


def why_not(settings: Any) -> str:
    """Why these settings cannot be run on this machine, with what to do; empty if they can."""
    name, world = settings.strategy, settings.world_size
    if name == "single" and world > 1:
        return f"--strategy single runs on one worker, got {world}; leave --workers out, or use ddp"
    if name == "dp":
        if settings.no_cuda or not torch.cuda.is_available():
            return "--strategy dp (nn.DataParallel) copies the model to GPUs and there is none here; use ddp"
        if world > 1:
            return f"--strategy dp is one process for all GPUs, got {world} workers; leave --workers out"
    if name == "fsdp" and settings.precision == "fp16":
        return "--strategy fsdp has no gradient scaler for fp16; use bf16"
    if name.startswith("zero"):
        return _why_not_deepspeed(settings)
    if name == "pipeline":
        if settings.model.startswith("t5"):
            return f"--strategy pipeline cuts GPT-2 into stages, got {settings.model}; use --model gpt2 or gpt2-tiny"
        if settings.precision != "fp32":
            return f"--strategy pipeline computes in fp32, got {settings.precision}"
    return ""


def _why_not_deepspeed(settings: Any) -> str:
    if not importlib.util.find_spec("deepspeed"):
        return f"--strategy {settings.strategy} needs DeepSpeed: python install.py benchmark"
    from benchmark.engines.deepspeed_config import contradiction

    return contradiction(settings)
