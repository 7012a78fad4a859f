"""The workers of a benchmark: started here, joined, and which of them prints the result."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmark.engines.operators import compile_operators
from benchmark.settings import Settings
from cluster.guard import die_with_parent
from common.config import RunConfig
from common.errors import InputError
from common.paths import ROOT
from common.workers.process_group import Worker

Value = TypeVar("Value")
Work = Callable[[], None]
STARTER_REPORTS = "COS598D_STARTER_REPORTS"  # in the environment of workers that were started by start_workers


def join(config: RunConfig) -> None:
    """The process group of a run; waits until all workers are there."""
    # DeepSpeed takes its GPU by this. Without torchrun, rank_on_node is the global rank; the GPU is chosen already.
    here = torch.cuda.current_device() if torch.cuda.is_initialized() else config.rank_on_node
    os.environ["LOCAL_RANK"] = str(here)
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group(config.backend, init_method=address, rank=config.rank, world_size=config.world_size)


def of_everybody(own: Value, worker: Worker) -> list[Value]:
    """What each worker hands in, in the order of ranks. A collective."""
    everybody = [own] * worker.world_size
    dist.all_gather_object(everybody, own)
    return everybody


def reports(settings: Settings) -> bool:
    """Whether this worker prints the result: rank 0 does, unless the command that started it will."""
    return settings.rank == 0 and STARTER_REPORTS not in os.environ


def start_workers(module: str, count: int, argv: list[str]) -> int:
    """Run `python -m module argv` on `count` workers of this machine; their output goes to stderr. The exit code."""
    launch = [sys.executable, "-m", "cluster.launch", "--workers", str(count), "--", "-m", module, *argv]
    # If this process is killed, nobody shall go on computing and writing: the launcher ends with it, and its workers.
    environment = os.environ | {STARTER_REPORTS: "1"}
    return subprocess.run(launch, cwd=ROOT, stdout=sys.stderr, env=environment, preexec_fn=die_with_parent).returncode


def on_workers(
    module: str, settings: Settings, starts: bool, strategies: Iterable[str], work: Work, *more: str
) -> bool:
    """Start all workers if this process shall, or do the work of the only one. Return whether this process reports.

    more: flags for workers that are started, beside those of this command.
    """
    if starts or STARTER_REPORTS not in os.environ:  # before workers meet: torchrun and srun have built nothing
        compile_operators(strategies, settings.no_cuda)
    if starts:
        prepare(settings.output_dir)
    if not starts or (settings.world_size == 1 and not more):
        work()
        return reports(settings)
    if code := start_workers(module, settings.world_size, [*without(sys.argv[1:], "--workers"), *more]):
        sys.exit(code)
    return True


def prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--output_dir: cannot write to {folder}: {error.strerror}; name another") from None


def without(argv: list[str], *flags: str) -> list[str]:
    """The command line less some flags and their values: the launcher says these in its own words."""
    kept, skip = [], False
    for word in argv:
        if not skip and word.partition("=")[0] not in flags:
            kept.append(word)
        skip = word in flags
    return kept
