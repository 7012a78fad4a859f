"""The flags of the commands that workers run together, and what is wrong with them."""

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmark.names import MODELS, add_strategies, check_model, command_parser, names_of
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, add_engines, why_not
from benchmark.training.model_config import kind_of
from cluster.launch import free_port
from common.arguments import add_common_flags, complete
from common.errors import InputError
from common.flags import add_memory_limit, check_at_least
from common.workers.place import place_starter, place_worker

PRECISIONS = ("fp32", "bf16", "fp16")
FRAMEWORKS = ("none", "dp", "ddp", "fsdp", "deepspeed")
BUCKET_MB = 4.0
OURS = tuple(STRATEGIES)  # without those of --engine
OF_STRATEGY = {  # flags that the other strategies have no use for
    "bucket_mb": ["own_overlap"],
    "grid": ["own_grid"],
    "deepspeed_config": [name for name, row in STRATEGIES.items() if row.zero],
}
AddFlags = Callable[[argparse.ArgumentParser], None]


def parse(
    argv: list[str], command: str = "run", about: str | None = None, add_flags: AddFlags | None = None
) -> tuple[Settings, argparse.Namespace]:
    """The settings and all flags; flags.starts_workers says whether this process shall start them, or is one.

    `command` is the module of benchmark/ whose flags these are, `about` its help. `add_flags` adds those of its own;
    without it, they are those of benchmark.run, which has one strategy. Raises InputError for what cannot be run.
    """
    flags = _parser(command, about or __doc__, add_flags or add_run_flags).parse_args(argv)
    engines = add_engines(flags.engine, flags.like) if flags.engine else []
    strategy = "" if add_flags else engines[0] if engines else _strategy(flags)
    if hasattr(flags, "strategies"):  # a command that takes several
        flags.strategies = flags.strategies or ("" if engines else "all")
        flags.names = names_of("--strategies", flags.strategies, OURS) if flags.strategies else []
        flags.names += engines
    is_rank = flags.local_rank != -1 or "RANK" in os.environ
    world_size = flags.world_size or int(os.environ.get("WORLD_SIZE", 0))
    if flags.workers is not None and world_size and flags.workers != world_size:
        raise InputError(f"--workers {flags.workers} contradicts a world size of {world_size}; leave --workers out")
    check_at_least(flags, 1, "batch_size", "accumulation", "max_steps", "eval_batches")
    check_at_least(flags, 0, "eval_every", "checkpoint_every", "dropped")
    check_at_least(flags, 8, "length")
    if is_rank:
        place = place_worker(flags, os.environ)
    else:
        place = place_starter(flags, flags.workers or world_size or flags.usual_workers, free_port(), os.environ)
    settings = complete(
        Settings, f"benchmark/{Path(flags.model).name}-{strategy or command}", flags, place,
        strategy=strategy,
        model_name_or_path=flags.model,
        overwrite_output_dir=flags.overwrite_output_dir or flags.resume,
        bucket_mb=BUCKET_MB if flags.bucket_mb is None else flags.bucket_mb,
    )  # fmt: skip
    check_model("--model", settings.model)
    _check(settings)
    if not add_flags:
        _check_run(settings, flags)
    flags.starts_workers = not is_rank
    return settings, flags


def _parser(command: str, about: str, add_flags: AddFlags) -> argparse.ArgumentParser:
    parser = command_parser(command, about)
    add_common_flags(parser)
    parser.set_defaults(learning_rate=1e-4, dropout=0.0, max_steps=20, optimizer="adamw", usual_workers=1)
    add = parser.add_argument
    models = f"{', '.join(MODELS)}, a folder, or FILE.py:NAME for a model of your own (default: gpt2-tiny)"
    add("--model", "--model_name_or_path", default="gpt2-tiny", help=models)
    add("--workers", type=int, help="number of workers to start on this machine")
    add("--batch_size", type=int, default=4, help="examples per worker and forward pass (%(default)s)")
    add("--accumulation", type=int, default=1, help="micro-batches per optimizer step (1)")
    add("--length", type=int, default=64, help="tokens per example (%(default)s)")
    add("--precision", choices=PRECISIONS, default="fp32", help="numeric precision (default: fp32)")
    add("--deepspeed_config", type=Path, help="a DeepSpeed file of your own")
    add("--recompute", action="store_true", help="activation checkpointing: recompute each block in backward")
    compiled = "torch.compile each block; inductor (without a name) needs g++, aot_eager nothing"
    add("--compile", nargs="?", const="inductor", choices=("inductor", "cudagraphs", "aot_eager"), help=compiled)
    add("--find_unused_parameters", action="store_true", help="ddp: allow parameters that get no gradient in a step")
    add("--bucket_mb", type=float, help=f"own_overlap: gradient bucket size in MiB ({BUCKET_MB:g})")
    add("--grid", help="own_grid: workers along each axis, such as data=2,tensor=2 (the default on 4)")
    add("--bleu", action="store_true", help="T5: BLEU of the trained model, which the first worker gathers")
    add("--cosine", action="store_true", help="cosine learning-rate decay (default: constant)")
    add("--engine", default="", metavar="FILE.py:NAME,...", help="engines outside of this repository")
    add("--like", choices=STRATEGIES, default="ddp", metavar="STRATEGY", help="whose limits they have (ddp)")
    if add_flags is not add_run_flags:
        add_strategies(parser, "")
        of_run = command_parser("run", about)  # the other commands take their own steps, with run's defaults
        add_run_flags(of_run)
        parser.set_defaults(**vars(of_run.parse_args([])) | {"strategy": ""})
    add_flags(parser)
    return parser


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of benchmark.run alone."""
    add_memory_limit(parser)
    add = parser.add_argument
    add("--strategies", "--strategy", dest="strategy", help=f"one of {', '.join(STRATEGIES)} (default: ddp)")
    add("--framework", choices=FRAMEWORKS, help="alternative to --strategies; combine with --zero_stage and --offload")
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), help="with --framework deepspeed")
    add("--offload", action="store_true", help="with --framework deepspeed and stages 1 to 3")
    add("--eval_every", type=int, default=0, help="validate every N steps (default: at the end)")
    add("--eval_batches", type=int, default=8, help="batches per validation (8)")
    add("--checkpoint_every", type=int, default=0, help="save a checkpoint every N steps")
    add("--resume", action="store_true", help="continue from the last checkpoint in --output_dir")
    add("--save", action="store_true", help="save the trained model in Hugging Face's format")
    add("--dropped", type=int, default=2, help="warm-up steps that are not measured (2)")
    add(
        "--keep_trace",
        action="store_true",
        help="keep trace, table of operators and memory over time of the traced steps",
    )
    add("--wandb", action="store_true", help="also log to Weights & Biases, offline")


def _strategy(flags: argparse.Namespace) -> str:
    """The strategy's name, also from --framework, --zero_stage and --offload."""
    framework, stage, offload = flags.framework, flags.zero_stage, flags.offload
    if framework and flags.strategy:
        raise InputError("expected --strategies or --framework, got both; leave one out")
    if framework != "deepspeed" and (stage is not None or offload):
        instead = f", got {framework}" if framework else "; or use --strategies zero2_offload"
        raise InputError(f"--zero_stage and --offload go with --framework deepspeed{instead}")
    if offload and not stage:
        raise InputError("--offload needs --zero_stage 1, 2 or 3: stage 0 shards nothing")
    if framework == "deepspeed":
        return f"zero{stage or 0}{'_offload' if offload else ''}"
    name = "single" if framework == "none" else framework or flags.strategy or "ddp"
    if name not in STRATEGIES:
        raise InputError(f"--strategies: expected one of {', '.join(STRATEGIES)}; got {name!r}")
    return name


def _check(settings: Settings) -> None:
    """Raise InputError for settings with which no strategy can be run."""
    if not 0 < settings.bucket_mb <= 2**20:
        raise InputError(f"--bucket_mb: expected a size in MiB above 0, got {settings.bucket_mb}")
    if settings.precision == "fp16" and (settings.no_cuda or not torch.cuda.is_available()):
        raise InputError("--precision fp16 needs a GPU that PyTorch can see; use bf16 or fp32 here")
    if settings.warmup_steps >= settings.max_steps:
        raise InputError(f"--warmup_steps: expected fewer than {settings.max_steps} steps, got {settings.warmup_steps}")
    if settings.bleu and kind_of(settings.model) != "t5":
        raise InputError(f"--bleu is for T5, got {settings.model}; leave it out: validation has the loss")
    if settings.recompute and kind_of(settings.model) == "own":
        raise InputError(f"--recompute is for models by name or folder, got {settings.model}; leave it out")
    _check_installed("sacrebleu" if settings.bleu else "")


def _check_run(settings: Settings, flags: argparse.Namespace) -> None:
    """Raise InputError for what this one strategy cannot do."""
    for flag, strategies in OF_STRATEGY.items():
        if getattr(flags, flag) is not None and settings.strategy not in strategies:
            expected = " or ".join(strategies)
            raise InputError(f"--{flag}: works with --strategies {expected}, got {settings.strategy}; leave it out")
    _check_installed("tensorboard", "wandb" if settings.wandb else "")
    if reason := why_not(settings):
        raise InputError(reason)


def _check_installed(*packages: str) -> None:
    for package in packages:
        if package and not importlib.util.find_spec(package):
            raise InputError(f"{package} is missing; install it with: python -m pip install {package}")
