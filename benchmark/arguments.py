"""The flags of the commands that workers run together, and what is wrong with them."""

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmark.names import MODELS, check_model, command_parser
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.model_config import kind_of
from common.arguments import add_common_flags, complete
from common.errors import InputError
from common.flags import add_memory_limit, check_at_least
from common.workers.place import PORT, place_starter, place_worker

PRECISIONS = ("fp32", "bf16", "fp16")
OF_STRATEGY = {
    "bucket_mb": ["own_overlap"],
    "grid": ["own_grid"],
    "deepspeed_config": [name for name, row in STRATEGIES.items() if row.zero],
}
FRAMEWORKS = ("none", "dp", "ddp", "fsdp", "deepspeed")
AddFlags = Callable[[argparse.ArgumentParser], None]


def parse(
    argv: list[str], command: str = "run", about: str | None = None, add_flags: AddFlags | None = None
) -> tuple[Settings, argparse.Namespace]:
    """The settings and all flags; flags.start lists how many workers to start, None where this process is one already.

    `command` is the module of benchmark/ whose flags these are, `about` its help, `add_flags` adds those of its own;
    without it, the flags are those of benchmark.run. Raises InputError for anything that cannot be run.
    """
    flags = _parser(command, about or __doc__, add_flags).parse_args(argv)
    strategy = _strategy(flags)
    if strategy not in STRATEGIES:
        raise InputError(f"--strategy: expected one of {', '.join(STRATEGIES)}; got {strategy!r}")
    is_rank = flags.local_rank != -1 or "RANK" in os.environ
    world_size = flags.world_size or int(os.environ.get("WORLD_SIZE", 0))
    if flags.workers is not None and world_size and flags.workers != world_size:
        raise InputError(f"--workers {flags.workers} contradicts a world size of {world_size}; leave --workers out")
    check_at_least(flags, 1, "batch_size", "accumulation", "max_steps", "eval_batches")
    check_at_least(flags, 0, "eval_every", "checkpoint_every", "dropped")
    check_at_least(flags, 8, "length")
    for flag, strategies in OF_STRATEGY.items():
        if not add_flags and getattr(flags, flag) is not None and strategy not in strategies:
            raise InputError(f"--{flag}: works with --strategy {' or '.join(strategies)}, got {strategy}; leave it out")
    if is_rank:
        place = place_worker(flags, os.environ)
    else:
        place = place_starter(flags, flags.workers or world_size or flags.usual_workers, PORT, os.environ)
    settings = complete(
        Settings, f"benchmark/{Path(flags.model).name}-{strategy}", flags, place,
        strategy=strategy,
        model_name_or_path=flags.model,
        overwrite_output_dir=flags.overwrite_output_dir or flags.resume,
        bucket_mb=_bucket_mb(flags.bucket_mb or "4"),
    )  # fmt: skip
    check_model("--model", settings.model)
    if settings.precision == "fp16" and (settings.no_cuda or not torch.cuda.is_available()):
        raise InputError("--precision fp16 needs a GPU that PyTorch can see; use bf16 or fp32 here")
    if settings.warmup_steps >= settings.max_steps:
        raise InputError(f"--warmup_steps: expected fewer than {settings.max_steps} steps, got {settings.warmup_steps}")
    if settings.bleu and kind_of(settings.model) != "t5":
        raise InputError(f"--bleu is for T5, got {settings.model}; leave it out: validation has the loss")
    packages = {"tensorboard": not add_flags, "sacrebleu": settings.bleu}
    for package in [package for package, is_needed in packages.items() if is_needed]:
        if not importlib.util.find_spec(package):
            raise InputError(f"{package} is missing; install it with: python -m pip install {package}")
    if reason := why_not(settings):
        raise InputError(reason)
    flags.start = None if is_rank else [settings.world_size]
    return settings, flags


def _parser(command: str, about: str | None, add_flags: AddFlags | None) -> argparse.ArgumentParser:
    parser = command_parser(command, about)
    add_common_flags(parser)
    parser.set_defaults(learning_rate=1e-4, dropout=0.0, max_steps=20, optimizer="adamw", usual_workers=1)
    add = parser.add_argument
    models = f"{', '.join(MODELS)}, a folder, or FILE.py:NAME for a model of your own (default: gpt2-tiny)"
    add("--model", "--model_name_or_path", default="gpt2-tiny", help=models)
    add("--workers", type=int, help="number of workers to start on this machine (default: 1)")
    add("--batch_size", type=int, default=4, help="examples per worker and forward pass (%(default)s)")
    add("--accumulation", type=int, default=1, help="micro-batches per optimizer step (1)")
    add("--length", type=int, default=64, help="tokens per example (%(default)s)")
    add("--precision", choices=PRECISIONS, default="fp32", help="numeric precision (default: fp32)")
    add("--deepspeed_config", type=Path, help="a DeepSpeed file of your own")
    add("--bucket_mb", help="own_overlap: gradient bucket size in MiB, or auto to measure and choose (4)")
    add("--grid", help="own_grid: workers along each axis, such as data=2,tensor=2 (the default on 4)")
    if add_flags:
        of_run = command_parser(command, None)  # whose flags the other commands, which take their own steps, lack
        _add_run_flags(of_run)
        parser.set_defaults(**vars(of_run.parse_args([])))
        add_flags(parser)
    else:
        _add_run_flags(parser)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add_memory_limit(parser)
    add = parser.add_argument
    add_training_flags(parser)
    add("--strategy", help=f"{', '.join(STRATEGIES)} (default: ddp)")
    add("--framework", choices=FRAMEWORKS, help="alternative to --strategy; combine with --zero_stage and --offload")
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), help="with --framework deepspeed")
    add("--offload", action="store_true", help="with --framework deepspeed and stages 1 to 3")
    add("--eval_every", type=int, default=0, help="validate every N steps (default: at the end)")
    add("--eval_batches", type=int, default=8, help="batches per validation (8)")
    add("--checkpoint_every", type=int, default=0, help="save a checkpoint every N steps")
    add("--resume", action="store_true", help="continue from the last checkpoint in --output_dir")
    add("--save", action="store_true", help="save the trained model in Hugging Face's format")
    add("--dropped", type=int, default=2, help="warm-up steps that are not measured (2)")
    add("--keep_trace", action="store_true", help="keep the profiler's trace of the traced steps")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    bleu = "T5: BLEU of the trained model, which the first worker gathers"
    parser.add_argument("--bleu", action="store_true", help=bleu)
    parser.add_argument("--cosine", action="store_true", help="cosine learning-rate decay (default: constant)")


def _bucket_mb(word: str) -> float | None:
    if word == "auto":
        return None
    try:
        size = float(word)
    except ValueError:
        size = 0.0
    if not 0 < size <= 2**20:
        raise InputError(f"--bucket_mb: expected a size in MiB above 0, or auto; got {word!r}")
    return size


def _strategy(flags: argparse.Namespace) -> str:
    """The strategy's name, also from --framework, --zero_stage and --offload."""
    framework, stage, offload = flags.framework, flags.zero_stage, flags.offload
    if framework and flags.strategy:
        raise InputError("expected --strategy or --framework, got both; leave one out")
    if framework != "deepspeed" and (stage is not None or offload):
        instead = f", got {framework}" if framework else "; or use --strategy zero2_offload"
        raise InputError(f"--zero_stage and --offload go with --framework deepspeed{instead}")
    if offload and not stage:
        raise InputError("--offload needs --zero_stage 1, 2 or 3: stage 0 shards nothing")
    if framework == "deepspeed":
        return f"zero{stage or 0}{'_offload' if offload else ''}"
    return "single" if framework == "none" else framework or flags.strategy or "ddp"
