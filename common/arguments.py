"""Parses and checks every flag of the task scripts, and returns them as a frozen dataclass.

A wrong flag is reported in one line before any rank joins a process group. After joining, one rank's error would
make the others hang.
"""

import argparse
import os
from argparse import Namespace
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

from common.config import BeyondConfig, GlueConfig, Gpt2Config, Grid, Place, RunConfig, TrafficConfig
from common.errors import InputError
from common.flags import (
    Parser,
    add_memory_limit,
    check_at_least,
    integer_of,
    link_rate,
    or_default,
    true_or_false,
    whole_number,
)  # fmt: skip
from common.paths import ROOT
from common.script_defaults import script_defaults
from common.workers.place import COURSE_PORT, PORT, place_starter, place_worker
from common.workers.rows import STOPPED_FILE

TIMELINE_STEPS = 3  # if --timeline names no number
Config = TypeVar("Config", bound=RunConfig)
Glue = TypeVar("Glue", bound=GlueConfig)
Gpt2 = TypeVar("Gpt2", bound=Gpt2Config)


def parse_glue_arguments(task: str, argv: list[str] | None = None) -> GlueConfig:
    """Return the flags of a run_glue.py. Raises InputError, or exits with code 2 on a flag that does not exist."""
    return _glue_config(GlueConfig, task, _glue_parser(task).parse_args(argv))


def parse_worker_arguments(task: str, argv: list[str] | None = None) -> RunConfig:
    """Return the flags of a script that has workers and no model."""
    parser = Parser(description=task, allow_abbrev=False)
    add_common_flags(parser)
    parser.set_defaults(model_name_or_path="", learning_rate=1.0)  # nothing is loaded, nothing learns
    flags = parser.parse_args(argv)
    return complete(RunConfig, task, flags, place_worker(flags, os.environ))


def parse_traffic_arguments(task: str, argv: list[str] | None = None) -> TrafficConfig:
    """Return the flags of task 4, which also choose the precision of what is sent."""
    parser = _glue_parser(task)
    add = parser.add_argument_group("traffic").add_argument
    add("--grad_dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="dtype in which gradients are sent")
    add("--interface", default="", help="interface whose bytes are counted (default: the route to --master_ip)")
    add("--link_rate", type=link_rate, help="rate of a worker's link, such as 1gbit; predicts the communication time")
    return _glue_config(TrafficConfig, task, parser.parse_args(argv))


def _glue_parser(task: str) -> argparse.ArgumentParser:
    parser = Parser(description=f"{task}: fine-tune BERT on a GLUE task", allow_abbrev=False)
    add_common_flags(parser)
    _add_profile(parser, task)
    _add_glue_flags(parser)
    return parser


def _glue_config(kind: type[Glue], task: str, flags: Namespace) -> Glue:
    """Return the configuration of a run_glue.py, checked."""
    sample = flags.data_dir is None
    place = place_worker(flags, os.environ)
    neither = not (flags.do_train or flags.do_eval)
    defaults = script_defaults()
    # The sample is made so that a tiny model can learn it in seconds: that needs a larger learning rate than BERT's.
    config = complete(
        kind, task, flags, place,
        model_name_or_path=flags.model_name_or_path or ("tiny" if sample else defaults.bert),
        learning_rate=or_default(flags.learning_rate, SAMPLE_GLUE["learning_rate"] if sample else 5e-5),
        num_train_epochs=or_default(flags.num_train_epochs, SAMPLE_GLUE["epochs"] if sample else 3),
        max_seq_length=or_default(flags.max_seq_length, SAMPLE_GLUE["max_seq_length"] if sample else 128),
        per_gpu_train_batch_size=or_default(flags.per_gpu_train_batch_size, max(1, 64 // place.world_size)),
        do_train=flags.do_train or neither,
        do_eval=flags.do_eval or neither,
        task_name=(flags.task_name or ("rte" if sample else defaults.task_name)).lower(),
    )  # fmt: skip
    if config.task_name not in defaults.tasks:
        raise InputError(f"--task_name: expected one of {', '.join(defaults.tasks)}; got {config.task_name!r}")
    if sample and config.task_name != "rte":
        raise InputError(
            f"--task_name {config.task_name}: the embedded sample has RTE alone; download this task with "
            "`python download_glue_data.py`, and pass its folder as --data_dir"
        )
    check_at_least(config, 1, "per_gpu_train_batch_size", "per_gpu_eval_batch_size", "num_train_epochs")
    check_at_least(config, 8, "max_seq_length")
    with_model = _find_model(config, "bert")
    own = _model_path(flags.config_name, "bert", weights=False) if flags.config_name else ""
    return replace(with_model, config_name=own or with_model.model_name_or_path)


def parse_gpt2_arguments(task: str, argv: list[str] | None = None, world_size: int = 1) -> Gpt2Config:
    """Return the flags of a run_gpt2.py; `world_size` is the default of a script that starts its own workers."""
    flags = _gpt2_parser(task, world_size).parse_args(argv)
    mode = flags.model_parallel_mode if flags.schedule == "threads" else flags.schedule
    run_name = f"{task}_gpt2"
    if task == "pipeline":  # a folder for each mode, so that none replaces the record of another
        run_name = task if mode == "pipeline_parallel" else f"{task}_{mode}"
    if world_size == 1:
        place = place_worker(flags, os.environ)
    else:
        port = COURSE_PORT
        if flags.master_port is None:
            port = integer_of(os.environ, "MASTER_PORT", COURSE_PORT, "--master_port")
        place = place_starter(flags, world_size, port, os.environ)
    config = _gpt2_config(Gpt2Config, task, run_name, flags, place)
    _check_batch(config.batch_size, config.world_size, "workers")
    return config


BEYOND_STRATEGIES = ("ring", "overlap", "zero1", "zero2", "zero3", "tensor", "1f1b", "grid")


def parse_beyond_arguments(argv: list[str] | None = None) -> BeyondConfig:
    """Return the flags of the bonus script, which has one strategy for each lesson."""
    parser = _gpt2_parser("beyond")
    add = parser.add_argument
    add("--strategy", choices=BEYOND_STRATEGIES, default="ring", help="the lesson to use (ring)")
    add("--bucket_mb", type=float, default=4.0, help="overlap: largest size of a bucket in MiB (4)")
    add("--save_to", type=Path, help="zero1 to zero3: folder in which every rank saves its shards at the end")
    add("--resume_from", type=Path, help="zero1 to zero3: start from the shards that --save_to saved")
    add("--grid", help="grid: ranks along each axis, for instance data=2,tensor=2 (the default on 4 workers)")
    add("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="with several stages: the order of work (1f1b)")
    add("--n_chunk", type=int, help="with several stages: micro-batches in the batch of a rank (4)")
    add_memory_limit(parser)
    flags = parser.parse_args(argv)
    for name in ("save_to", "resume_from"):
        if getattr(flags, name) and not flags.strategy.startswith("zero"):
            raise InputError(f"--{name}: expected a strategy with shards (zero1, zero2, zero3), got {flags.strategy}")
    if not 0 < flags.bucket_mb <= 2**20:
        raise InputError(f"--bucket_mb: expected a size in MiB, above 0, got {flags.bucket_mb}")
    place = place_worker(flags, os.environ)
    grid = parse_grid(flags.strategy, flags.grid, place.world_size)
    task = f"beyond_{flags.strategy}"
    schedule = "" if flags.schedule == "1f1b" else f"_{flags.schedule}"
    bucket_bytes = int(flags.bucket_mb * 2**20)
    config = _gpt2_config(BeyondConfig, task, task + schedule, flags, place, grid=grid, bucket_bytes=bucket_bytes)
    _check_batch(config.batch_size, grid.data, "workers")
    if grid.pipeline > 1:
        _check_batch(config.batch_size, grid.data * config.n_chunk, "micro-batches, see --n_chunk")
    if grid.tensor * grid.pipeline > 1:
        from transformers import AutoConfig  # here, because it takes seconds and other strategies do not need it

        sizes = AutoConfig.from_pretrained(config.model_name_or_path)
        check_cut(sizes.n_layer, sizes.n_head, grid)
    return config


def parse_grid(strategy: str, text: str | None, world_size: int) -> Grid:
    """Return the grid that --grid describes, or that the strategy means."""
    if strategy != "grid":
        if text is not None:
            raise InputError(f"--grid works only with --strategy grid, got {strategy}")
        axis = {"tensor": "tensor", "1f1b": "pipeline"}.get(strategy, "data")
        return Grid(**{axis: world_size})
    if text is None:
        if world_size != 4:
            raise InputError(f"--grid: expected a grid for {world_size} workers, for instance tensor={world_size}")
        return Grid(data=2, tensor=2)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in ("pipeline", "data", "tensor") or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise InputError(f"--grid: expected axes and sizes such as pipeline=2,data=2,tensor=1, got {text!r}")
        sizes[axis] = int(size)
    grid = Grid(**sizes)
    if grid.ranks != world_size:
        raise InputError(f"--grid: {text} needs {grid.ranks} workers, got {world_size}")
    return grid


def check_cut(blocks: int, heads: int, grid: Grid) -> None:
    """Raise InputError unless a model with so many blocks and heads can be cut into these stages and slices."""
    if grid.pipeline > blocks:
        raise InputError(f"--grid: expected at most {blocks} stages, one for each block; got {grid.pipeline}")
    if heads % grid.tensor:
        raise InputError(
            f"--grid: expected a tensor axis that divides the {heads} attention heads of the model, got {grid.tensor}"
        )


def _gpt2_parser(task: str, world_size: int = 1) -> argparse.ArgumentParser:
    parser = Parser(description=f"{task}: train GPT-2 on OSCAR text", allow_abbrev=False)
    if world_size > 1:
        add_common_flags(parser, world_size, COURSE_PORT)
    else:
        add_common_flags(parser)
    _add_profile(parser, task)
    _add_gpt2_flags(parser, task)
    return parser


def _gpt2_config(kind: type[Gpt2], task: str, run_name: str, flags: Namespace, place: Place, **chosen: object) -> Gpt2:
    """Return the configuration of a run_gpt2.py, checked. Its record goes to runs/<run_name>."""
    if flags.schedule != "threads" and flags.model_parallel_mode == "model_parallel":
        raise InputError(f"--schedule {flags.schedule} is a pipeline; do not pass --model_parallel_mode")
    sample = flags.data_dir is None
    config = complete(
        kind, run_name, flags, place,
        task=task,
        model_name_or_path=flags.model_name_or_path or ("tiny" if sample else script_defaults().gpt2),
        learning_rate=or_default(flags.learning_rate, SAMPLE_GPT2["learning_rate"] if sample else 1e-4),
        model_max_length=or_default(flags.model_max_length, SAMPLE_GPT2["model_max_length"] if sample else 128),
        **chosen,
    )  # fmt: skip
    check_at_least(config, 1, "batch_size", "n_epochs", "n_chunk")
    check_at_least(config, 8, "model_max_length")
    return _find_model(config, "gpt2")


def _check_batch(total: int, pieces: int, what: str) -> None:
    """Raise InputError unless a batch can be divided into equal pieces."""
    if total % pieces:
        advice = max(pieces, total - total % pieces)
        raise InputError(
            f"--batch_size: the total batch size {total} is not divisible by {pieces} ({what}); "
            f"use a multiple of {pieces}, for example {advice}"
        )


# What suits the embedded sample and the tiny models, found by trying five seeds.
SAMPLE_GLUE = {"learning_rate": 1e-3, "epochs": 8, "max_seq_length": 32}
SAMPLE_GPT2 = {"learning_rate": 1e-3, "model_max_length": 64}


def add_common_flags(parser: argparse.ArgumentParser, world_size: int = 1, port: int = PORT) -> None:
    """Add the flags of every script that trains; `world_size` and `port` are the defaults."""
    add = parser.add_argument
    parser.set_defaults(profile=False, timeline=0, check_gradients=False)
    add("--data_dir", type=Path, help="folder with the data (default: the embedded sample)")
    add("--model_name_or_path", help="tiny, a hub name or a folder (default: tiny for the sample)")
    add("--tokenizer_name", default="", help="tokenizer (default: the model's own)")
    add("--output_dir", type=Path, help="folder of the run's record (default: runs/<task>; the longest one is kept)")
    add("--overwrite_output_dir", action="store_true", help="replace the record of an earlier run in --output_dir")
    add("--learning_rate", type=float, help="AdamW's learning rate at the peak of the schedule")
    add("--weight_decay", type=float, default=0.0, help="weight decay of all parameters except biases and LayerNorm")
    add("--adam_epsilon", type=float, default=1e-8, help="AdamW's epsilon")
    add("--max_grad_norm", type=float, default=1.0, help="clip gradients to this norm (0: do not clip)")
    add("--warmup_steps", type=int, default=0, help="steps over which the learning rate rises from 0")
    add(
        "--max_steps", type=int, default=-1, help="stop after N steps, with the schedule of all epochs (default: never)"
    )
    add("--dropout", type=float, help="dropout probability (default: the model's own)")
    add("--seed", type=int, default=42, help="seed for weights, order of examples and dropout")
    add("--no_cuda", action="store_true", help="use the CPU even if there is a GPU")
    add = parser.add_argument_group("workers (not needed with torchrun)").add_argument
    add("--master_ip", help="address of rank 0 (default: 127.0.0.1)")
    add("--master_port", type=int, help=f"a free port above 1023 on rank 0's machine (default: {port})")
    add("--world_size", type=int, help=f"number of workers (default: {world_size})")
    add("--local_rank", type=int, default=-1, help="rank of this worker among all workers: 0 to world_size-1")
    # Not --local_rank: torch.distributed.launch passes --local-rank, the rank on the machine. It counts if nothing else
    # names the rank among all workers; place_worker says which value wins.
    add("--local-rank", type=int, default=-1, dest="dashed_local_rank", help=argparse.SUPPRESS)
    add("--backend", choices=("gloo", "nccl"), help="communication library (default: nccl on GPUs, gloo on CPUs)")
    add("--join_seconds", type=float, default=120.0, help="seconds to wait for the other workers to join")
    add("--hang_seconds", type=float, default=20.0, help="stop if no worker makes progress for this many seconds")


def _add_profile(parser: argparse.ArgumentParser, task: str) -> None:
    parser.add_argument("--profile", action="store_true", help="trace a few steps and list the parameters by size")
    parser.add_argument(
        "--timeline", type=whole_number, nargs="?", const=TIMELINE_STEPS, default=0, metavar="STEPS",
        help=f"show what all ranks do in a few steps ({TIMELINE_STEPS})",
    )  # fmt: skip
    if task.startswith("task"):  # elsewhere a worker holds only a part of the gradients
        parser.add_argument(
            "--check_gradients", action="store_true",
            help="compare the first step's gradients with those of one worker on the same examples (needs --dropout 0)",
        )  # fmt: skip


def _add_glue_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model_type", choices=("bert",), default="bert", help="architecture of the model")
    add("--config_name", default="", help="configuration (default: the model's own)")
    defaults = script_defaults()
    add("--task_name", help=f"GLUE task: {', '.join(defaults.tasks)} ({defaults.task_name})")
    add("--do_train", action="store_true", help="train (with neither --do_train nor --do_eval, the script does both)")
    add("--do_eval", action="store_true", help="evaluate on the dev set after every epoch")
    add("--do_lower_case", action="store_true", help="convert the text to lower case, for an uncased model")
    add("--max_seq_length", type=int, help="tokens per example; longer ones are cut, shorter ones padded")
    add("--per_gpu_train_batch_size", type=int, help="examples per step on one worker (default: 64 / world_size)")
    add("--per_gpu_eval_batch_size", type=int, default=64, help="examples per evaluation batch on one worker")
    add("--num_train_epochs", type=whole_number, help="passes over the training set")
    add("--overwrite_cache", action="store_true", help="tokenize again, even if the cache has the features")


def _add_gpt2_flags(parser: argparse.ArgumentParser, task: str) -> None:
    """Add the flags of all run_gpt2.py, and those that only one task uses."""
    add = parser.add_argument
    parser.set_defaults(pytest=False, model_parallel_mode="none", n_chunk=4, schedule="threads")
    add("--batch_size", type=int, default=64, help="examples per step on all workers together")
    add("--n_epochs", type=whole_number, default=2, help="passes over the training set")
    add("--model_max_length", type=int, help="tokens per training example")
    if task == "task2b_allreduce":
        add("--pytest", type=true_or_false, help="True: stop after averaging gradients once; save them in tests/")
    if task == "pipeline":
        modes = ("none", "model_parallel", "pipeline_parallel")
        add("--model_parallel_mode", choices=modes, help="how the blocks are distributed over the devices")
        add("--n_chunk", type=int, help="number of micro-batches per batch (pipeline modes only)")
        schedules = ("threads", "gpipe", "1f1b", "interleaved")
        add("--schedule", choices=schedules, help="threads, or one process per stage with this schedule")


def complete(kind: type[Config], run_name: str, flags: Namespace, place: Place, **chosen: object) -> Config:
    """Return a checked `kind`. A field has the value in `chosen`, else that in `place`, else that of its flag."""
    folder = (flags.output_dir or ROOT / "runs" / run_name).absolute()
    values = {"task": run_name, "output_dir": folder, "max_steps": max(0, flags.max_steps), **asdict(place), **chosen}
    config = kind(**{name: values[name] if name in values else getattr(flags, name) for name in _fields(kind)})
    check_at_least(config, 0, "weight_decay", "max_grad_norm", "warmup_steps", "seed", "timeline")
    if config.profile and config.timeline:
        raise InputError("--profile and --timeline both use torch's profiler; choose one of them")
    if config.check_gradients and config.dropout != 0:
        raise InputError("--check_gradients needs --dropout 0: with dropout, one worker computes other gradients")
    for name in ("learning_rate", "adam_epsilon", "join_seconds", "hang_seconds"):
        if not getattr(config, name) > 0:
            raise InputError(f"--{name}: expected a number above 0, got {getattr(config, name)}")
    if config.dropout is not None and not 0 <= config.dropout < 1:
        raise InputError(f"--dropout: expected a probability of at least 0 and below 1, got {config.dropout}")
    if config.data_dir is not None and not config.data_dir.is_dir():
        raise InputError(f"--data_dir: there is no folder {config.data_dir}; leave the flag out for the sample data")
    if config.rank == 0:
        _check_output(folder, may_have_files=flags.output_dir is None or config.overwrite_output_dir)
    return config


def _fields(kind: type[RunConfig]) -> list[str]:
    return [field.name for field in fields(kind)]


def _find_model(config: Config, kind: str) -> Config:
    """Return the configuration with names of models replaced by paths: a wrong name is reported before any join."""
    model = _model_path(config.model_name_or_path, kind)
    return replace(config, model_name_or_path=model, tokenizer_name=config.tokenizer_name or model)


def _model_path(name: str, kind: str, weights: bool = True) -> str:
    from common.models.load import model_path  # here: it loads transformers, and hello.py has no model

    return model_path(name, kind, weights)


def _check_output(folder: Path, may_have_files: bool) -> None:
    """Raise InputError unless the first worker can write into `folder`, which may not exist yet."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise InputError(f"--output_dir: expected a folder, but {nearest} is a file or a broken link; name another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"--output_dir: cannot write to {nearest} (Permission denied); name another folder")
    if nearest == folder and not may_have_files and any(file.name != STOPPED_FILE for file in folder.iterdir()):
        raise InputError(f"--output_dir: {folder} is not empty; name another, or add --overwrite_output_dir")
