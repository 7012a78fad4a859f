"""The strategies: how a model and its optimizer are spread over the workers. The loop is the same for all of them.

A row says all that the commands know of one. To add a strategy, write an Engine in engines/ and its row here. A row
loads nothing until it is used, so that commands check their flags without torch. What a strategy cannot do on this
machine is said in one line.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from common.errors import InputError
from common.paths import import_file

if TYPE_CHECKING:
    from torch import nn

    from benchmark.engines.engine import Engine
    from benchmark.settings import Settings
    from common.workers.process_group import Worker

ENGINES = "benchmark.engines"
Limit = Callable[["Settings"], str]  # why these settings cannot be run; empty if they can


def use_cpu() -> None:
    """Let DeepSpeed compute on the CPU. Call this before it is imported: then it looks for its accelerator."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def one_process(settings: "Settings") -> str:
    name, world = settings.strategy, settings.world_size
    return f"--strategies {name} runs on one worker, got {world}; leave --workers out, or use ddp" if world > 1 else ""


def needs_gpu(settings: "Settings") -> str:
    import torch

    if not settings.no_cuda and torch.cuda.is_available():
        return ""
    return f"--strategies {settings.strategy} (nn.DataParallel) needs a GPU, and this machine has none; use ddp"


def not_compiled(settings: "Settings") -> str:
    """DataParallel's copies would call the forward that was compiled for the first GPU's blocks."""
    return f"--strategies {settings.strategy} copies its blocks; leave --compile out" if settings.compile else ""


def no_fp16(settings: "Settings") -> str:
    fp16 = settings.precision == "fp16"
    return f"--strategies {settings.strategy} has no gradient scaler for fp16; use bf16" if fp16 else ""


def deepspeed(settings: "Settings") -> str:
    if not importlib.util.find_spec("deepspeed"):
        return f"--strategies {settings.strategy} needs DeepSpeed: python install.py benchmark"
    from benchmark.engines.deepspeed_config import contradiction

    return contradiction(settings, *STRATEGIES[settings.strategy].zero)


def megatron(settings: "Settings") -> str:
    missing = not importlib.util.find_spec("megatron")
    return "--strategies megatron needs megatron-core: python install.py megatron" if missing else ""


def horovod(settings: "Settings") -> str:
    if not importlib.util.find_spec("horovod"):
        return "--strategies horovod is built from source: python install.py horovod"
    import torch

    on_gpu = torch.cuda.is_available() and not settings.no_cuda
    return "--strategies horovod is built for CPUs; add --no_cuda" if on_gpu else ""


def gpt2_in_fp32(settings: "Settings") -> str:
    from benchmark.training.model_config import kind_of

    name = settings.strategy
    if kind_of(settings.model) != "gpt2":
        return f"--strategies {name} cuts GPT-2 into parts, got {settings.model}; use --model gpt2 or gpt2-tiny"
    for flag in ("recompute", "compile"):
        if getattr(settings, flag):
            return f"--strategies {name} cuts blocks, and --{flag} needs whole ones; leave it out"
    if settings.precision != "fp32":
        return f"--strategies {name} supports only fp32, got {settings.precision}; use --precision fp32"
    return ""


def heads(settings: "Settings") -> str:
    from benchmark.training.model_config import model_config
    from common.arguments import parse_grid

    parts = settings.world_size
    if STRATEGIES[settings.strategy].cuts == "grid":
        try:
            parts = parse_grid("grid", settings.grid, settings.world_size).tensor
        except InputError as error:
            return str(error)
    count = model_config(settings.model)[2].n_head if parts > 1 else 0
    expected = f"expected workers that divide the model's {count} attention heads, got {parts}"
    return f"--strategies {settings.strategy}: {expected}" if count % parts else ""


@dataclass(frozen=True)
class Label:
    """What a row of a table shows: a strategy, and in which variant, such as a second engine (again)."""

    strategy: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.strategy} {self.variant}".rstrip()


def load(file: str) -> ModuleType:
    """Return a module of engines/, or a user's file."""
    return import_file(Path(file), Path(file).stem) if file.endswith(".py") else import_module(f"{ENGINES}.{file}")


@dataclass(frozen=True)
class Strategy:
    """engine: a file and a class in engines/, or in a file outside of this repository.

    ideal: bytes per parameter by the papers, kept whole and divided among the workers (Rajbhandari et al. 2020, ZeRO,
    section 3, in fp32: 4 for a parameter, 4 for its gradient, 8 for Adam's states). zero: DeepSpeed's stage, offload.
    """

    name: str
    engine: str
    limits: tuple[Limit, ...] = ()
    ideal: tuple[float, float] = (16, 0)
    cuts: str = ""  # into what it cuts the model: pipeline, tensor or grid
    zero: tuple[int, bool] | tuple[()] = ()
    is_deferred: bool = False  # the model's parameters get their memory in the engine (beyond/deferred.py)

    def make(self, settings: "Settings", worker: "Worker", model: "nn.Module") -> "Engine":
        if self.zero and worker.device.type == "cpu":
            use_cpu()
        file, _, name = self.engine.rpartition(":")
        engine = getattr(load(file), name)
        made: Engine = engine(*self.zero, settings, worker, model)
        return made

    @property
    def is_from_file(self) -> bool:
        return ".py:" in self.engine

    @property
    def family(self) -> str:
        """Whose strategy it is."""
        if self.is_from_file:
            return FAMILIES[-1]
        if self.zero:
            return "DeepSpeed"
        if self.name.startswith("own_"):
            return "lessons of beyond/"
        return "other libraries" if self.name in ("horovod", "megatron") else "PyTorch"

    def why_not(self, settings: "Settings") -> str:
        return next((reason for limit in self.limits if (reason := limit(settings))), "")

    def ideal_bytes(self, parameters: int, workers: int) -> float:
        whole, share = self.ideal
        return (whole + share / workers) * parameters


ALONE, GPT2 = (one_process,), (gpt2_in_fp32,)
FAMILIES = ("PyTorch", "DeepSpeed", "lessons of beyond/", "other libraries", "from a file")  # each has its colour
ROWS = (
    Strategy("single", "single:Single", ALONE),
    Strategy("dp", "single:DP", (needs_gpu, one_process, not_compiled)),
    Strategy("ddp", "ddp:DDP"),
    Strategy("horovod", "horovod:Horovod", (horovod,)),
    Strategy("fsdp", "fsdp:FSDP", (no_fp16,), (0, 16), is_deferred=True),
    *(
        Strategy(f"zero{stage}{offload}", "deepspeed:DeepSpeed", (deepspeed,), ideal, zero=(stage, bool(offload)))
        for offload in ("", "_offload")
        for stage, ideal in enumerate([(16, 0), (8, 8), (4, 12), (0, 16)])
        if stage or not offload  # stage 0 has nothing to offload
    ),
    Strategy("pipeline", "pipeline:Pipeline", GPT2, (0, 16), "pipeline"),
    Strategy("tensor", "tensor:TensorParallel", (*GPT2, heads), (0, 16), "tensor"),
    Strategy("megatron", "megatron:Megatron", (megatron, *GPT2, heads), (0, 16), "tensor"),
    Strategy("own_ring", "own:OwnRing"),
    Strategy("own_overlap", "own:OwnOverlap"),
    Strategy("own_zero1", "own:OwnZero1", (no_fp16,), (8, 8)),
    Strategy("own_zero2", "own:OwnZero2", (no_fp16,), (4, 12)),
    Strategy("own_zero3", "own:OwnZero3", (no_fp16,), (0, 16), is_deferred=True),
    Strategy("own_tensor", "own_grid:OwnGrid", (*GPT2, heads), (0, 16), "tensor"),
    Strategy("own_1f1b", "own_grid:OwnGrid", GPT2, (0, 16), "pipeline"),
    Strategy("own_grid", "own_grid:OwnGrid", (*GPT2, heads), (0, 16), "grid"),
)
STRATEGIES = {row.name: row for row in ROWS}


def add_engines(text: str, like: str) -> list[str]:
    """Add rows for the engines of FILE.py:NAME,NAME, with the limits of the strategy `like`; return their names.

    Raises InputError if one is not there.
    """
    path, _, names = text.rpartition(":")
    module = load(str(Path(path).resolve())) if path.endswith(".py") and Path(path).is_file() else None
    for name in names.split(","):
        if not hasattr(module, name) or name in STRATEGIES:
            raise InputError(f"--engine: expected FILE.py:NAME, got {text!r}; there is no new {name} in {path!r}")
        row = replace(STRATEGIES[like], name=name, engine=f"{Path(path).resolve()}:{name}", zero=(), is_deferred=False)
        STRATEGIES[name] = row
    return names.split(",")


def why_not(settings: "Settings") -> str:
    """Why these settings cannot be run on this machine, with what to do; empty if they can."""
    return STRATEGIES[settings.strategy].why_not(settings)
