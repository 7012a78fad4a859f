"""The strategies: how a model and its optimizer are spread over the workers. The loop is the same for all of them.

Adding one: a class in engines/ that is an Engine, a line in STRATEGIES, its name in names.py. What a strategy cannot do
on this machine is said by why_not in one line, before any worker joins.
"""

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmark.engines.ddp import DDP
from benchmark.engines.engine import Engine
from benchmark.engines.fsdp import FSDP
from benchmark.engines.operators import use_cpu
from benchmark.engines.single import DP, Single
from benchmark.settings import Settings
from benchmark.training.workload import model_config
from common.arguments import parse_grid
from common.errors import InputError
from common.workers.process_group import Worker


def make_deepspeed(stage: int, offload: bool, settings: Settings, worker: Worker, model: nn.Module) -> Engine:
    if worker.device.type == "cpu":
        use_cpu()
    from benchmark.engines.deepspeed import DeepSpeed  # the import takes seconds

    return DeepSpeed(stage, offload, settings, worker, model)


def make_pipeline(settings: Settings, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines.pipeline import Pipeline

    return Pipeline(settings, worker, model)


def make_own(engine: str, settings: Settings, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines import own

    made: Engine = getattr(own, engine)(settings, worker, model)
    return made


def make_tensor(settings: Settings, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines.tensor import TensorParallel

    return TensorParallel(settings, worker, model)


def make_own_grid(settings: Settings, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines.own_grid import OwnGrid

    return OwnGrid(settings, worker, model)


STRATEGIES: dict[str, Callable[[Settings, Worker, nn.Module], Engine]] = {
    "single": Single,
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
    "tensor": make_tensor,
    "own_ring": partial(make_own, "OwnRing"),
    "own_overlap": partial(make_own, "OwnOverlap"),
    "own_zero1": partial(make_own, "OwnZero1"),
    "own_zero2": partial(make_own, "OwnZero2"),
    "own_zero3": partial(make_own, "OwnZero3"),
    "own_tensor": make_own_grid,
    "own_1f1b": make_own_grid,
    "own_grid": make_own_grid,
}


def why_not(settings: Settings) -> str:
    """Why these settings cannot be run on this machine, with what to do; empty if they can."""
    name, world = settings.strategy, settings.world_size
    if name == "single" and world > 1:
        return f"--strategy single runs on one worker, got {world}; leave --workers out, or use ddp"
    if name == "dp":
        if settings.no_cuda or not torch.cuda.is_available():
            return "--strategy dp (nn.DataParallel) needs a GPU, and this machine has none; use ddp"
        if world > 1:
            return f"--strategy dp is one process for all GPUs, got {world} workers; leave --workers out"
    if name in ("fsdp", "own_zero1", "own_zero2", "own_zero3") and settings.precision == "fp16":
        return f"--strategy {name} has no gradient scaler for fp16; use bf16"
    if name.startswith("zero"):
        return _why_not_deepspeed(settings)
    if name in ("pipeline", "tensor", "own_tensor", "own_1f1b", "own_grid"):
        if settings.model.startswith("t5"):
            return f"--strategy {name} cuts GPT-2 into parts, got {settings.model}; use --model gpt2 or gpt2-tiny"
        if settings.precision != "fp32":
            return f"--strategy {name} supports only fp32, got {settings.precision}; use --precision fp32"
    parts = world if name in ("tensor", "own_tensor") else 1
    if name == "own_grid":
        try:
            parts = parse_grid("grid", settings.grid, settings.world_size).tensor
        except InputError as error:
            return str(error)
    heads = model_config(settings.model)[2].n_head if parts > 1 else 0
    if heads % parts:
        return f"--strategy {name}: expected workers that divide the model's {heads} attention heads, got {parts}"
    return ""


def _why_not_deepspeed(settings: Settings) -> str:
    if not importlib.util.find_spec("deepspeed"):
        return f"--strategy {settings.strategy} needs DeepSpeed: python install.py benchmark"
    from benchmark.engines.deepspeed_config import contradiction

    return contradiction(settings)
