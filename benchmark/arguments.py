"""The flags of benchmark.run, and what is wrong with them."""

import argparse
import importlib.util
import os
from pathlib import Path

import torch

from benchmark.names import MODELS, STRATEGIES
from benchmark.settings import Settings
from common.arguments import add_common_flags, complete
from common.errors import InputError
from common.flags import Parser, check_at_least, only_fields, set_default

PRECISIONS = ("fp32", "bf16", "fp16")
FRAMEWORKS = ("none", "dp", "ddp", "fsdp", "deepspeed")


def parse(argv: list[str], command: str = "run", about: str | None = None) -> tuple[Settings, int | None]:
    """The settings, and how many workers are to be started with them; None where this process is one of them already.

    `command` is the module of benchmark/ whose flags these are, `about` its help.
    Raises InputError for anything that cannot be run.
    """
    arguments = vars(_parser(command, about or __doc__).parse_args(argv))
    arguments["strategy"] = _strategy(arguments)
    if arguments["strategy"] not in STRATEGIES:
        raise InputError(f"--strategy: expected one of {', '.join(STRATEGIES)}; got {arguments['strategy']!r}")
    is_rank = arguments["local_rank"] != -1 or "RANK" in os.environ
    workers, world_size = arguments["workers"], arguments["world_size"] or int(os.environ.get("WORLD_SIZE", 0))
    if workers is not None and world_size and workers != world_size:
        raise InputError(f"--workers {workers} contradicts a world size of {world_size}; leave --workers out")
    if not is_rank:
        arguments["world_size"], arguments["local_rank"] = workers or world_size or 1, 0
    arguments["model_name_or_path"] = arguments["model_name_or_path"] or arguments["model"]
    set_default(arguments, "learning_rate", 1e-4)
    set_default(arguments, "dropout", 0.0)
    arguments["overwrite_output_dir"] |= arguments["resume"]
    if arguments["max_steps"] == -1:
        arguments["max_steps"] = 20
    check_at_least(arguments, 1, "batch_size", "accumulation", "max_steps", "eval_batches")
    check_at_least(arguments, 0, "eval_every", "checkpoint_every", "dropped")
    check_at_least(arguments, 8, "length")
    arguments["bucket_mb"] = _bucket_mb(arguments["bucket_mb"])
    complete(f"benchmark/{Path(arguments['model']).name}-{arguments['strategy']}", arguments)
    if arguments["model"] not in MODELS and not (Path(arguments["model"]) / "config.json").is_file():
        raise InputError(f"--model: expected {', '.join(MODELS)} or a model's folder; got {arguments['model']!r}")
    if arguments["precision"] == "fp16" and (arguments["no_cuda"] or not torch.cuda.is_available()):
        raise InputError("--precision fp16 needs a GPU that PyTorch can see; use bf16 or fp32 here")
    if arguments["warmup_steps"] >= arguments["max_steps"]:
        raise InputError(
            f"--warmup_steps: expected fewer than {arguments['max_steps']} steps, got {arguments['warmup_steps']}"
        )
    for package in ["tensorboard", *(["wandb"] if arguments["wandb"] else [])]:
        if not importlib.util.find_spec(package):
            raise InputError(f"{package} is missing; install it with: python -m pip install {package}")
    settings = Settings(**only_fields(Settings, arguments))
    from benchmark.strategies import why_not  # here: it loads every strategy's library

    if reason := why_not(settings):
        raise InputError(reason)
    return settings, None if is_rank else arguments["world_size"]


def _parser(command: str, about: str | None) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m benchmark.{command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_common_flags(parser)
    add = parser.add_argument
    add("--strategy", help=f"{', '.join(STRATEGIES)} (default: ddp)")
    add("--framework", choices=FRAMEWORKS, help="alternative to --strategy; combine with --zero_stage and --offload")
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), help="with --framework deepspeed")
    add("--offload", action="store_true", help="with --framework deepspeed and stages 1 to 3")
    add("--model", default="gpt2-tiny", help=f"{', '.join(MODELS)}, or a folder (default: gpt2-tiny)")
    add("--workers", type=int, help="number of workers to start on this machine (default: 1)")
    add("--batch_size", type=int, default=4, help="examples per worker and forward pass (4)")
    add("--accumulation", type=int, default=1, help="micro-batches per optimizer step (1)")
    add("--length", type=int, default=64, help="tokens per example (64)")
    add("--precision", choices=PRECISIONS, default="fp32", help="numeric precision (default: fp32)")
    add("--deepspeed_config", type=Path, help="a DeepSpeed file of your own")
    add("--cosine", action="store_true", help="cosine learning-rate decay (default: constant)")
    add("--eval_every", type=int, default=0, help="validate every N steps (default: at the end)")
    add("--eval_batches", type=int, default=8, help="batches per validation (8)")
    add("--checkpoint_every", type=int, default=0, help="save a checkpoint every N steps")
    add("--resume", action="store_true", help="continue from the last checkpoint in --output_dir")
    add("--save", action="store_true", help="save the trained model in Hugging Face's format")
    add("--dropped", type=int, default=2, help="warm-up steps that are not measured (2)")
    add("--keep_trace", action="store_true", help="keep the profiler's trace of the traced steps")
    add("--bucket_mb", default="4", help="own_overlap: gradient bucket size in MiB, or auto to measure and choose (4)")
    add("--grid", help="own_grid: workers along each axis, such as data=2,tensor=2 (the default on 4)")
    add("--wandb", action="store_true", help="also log to Weights & Biases, offline")
    return parser


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


def _strategy(arguments: dict) -> str:
    """The strategy's name, also from --framework, --zero_stage and --offload."""
    framework = arguments["framework"]
    if framework is None:
        if arguments["zero_stage"] is not None or arguments["offload"]:
            raise InputError(
                "--zero_stage and --offload go with --framework deepspeed; or use --strategy zero2_offload"
            )
        return arguments["strategy"] or "ddp"
    if arguments["strategy"]:
        raise InputError("expected --strategy or --framework, got both; leave one out")
    if framework != "deepspeed":
        if arguments["zero_stage"] is not None or arguments["offload"]:
            raise InputError(f"--zero_stage and --offload go with --framework deepspeed, got {framework}")
        return "single" if framework == "none" else framework
    if arguments["offload"] and not arguments["zero_stage"]:
        raise InputError("--offload needs --zero_stage 1, 2 or 3: stage 0 shards nothing")
    return f"zero{arguments['zero_stage'] or 0}" + ("_offload" if arguments["offload"] else "")
