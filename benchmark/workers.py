"""The workers of a benchmark: started here, joined, and which of them prints the result."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist

from benchmark.settings import Settings
from cluster.guard import die_with_parent
from common.config import RunConfig
from common.paths import ROOT

STARTER_REPORTS = "COS598D_STARTER_REPORTS"  # in the environment of workers that were started by start_workers


def join(config: RunConfig) -> None:
    """The process group of a run; waits until all workers are there."""
    # DeepSpeed takes its GPU by this. Without torchrun, rank_on_node is the global rank; the GPU is chosen already.
    here = torch.cuda.current_device() if torch.cuda.is_initialized() else config.rank_on_node
    os.environ["LOCAL_RANK"] = str(here)
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group(config.backend, init_method=address, rank=config.rank, world_size=config.world_size)


def reports(settings: Settings) -> bool:
    """Whether this worker prints the result: rank 0 does, unless the command that started it will."""
    return settings.rank == 0 and STARTER_REPORTS not in os.environ


def start_workers(module: str, count: int, argv: list[str], quiet: bool = False) -> int:
    """Run `python -m module argv` on `count` workers of this machine; their output goes to stderr. The exit code."""
    launch = [sys.executable, "-m", "cluster.launch", "--workers", str(count), "--", "-m", module, *argv]
    silent = subprocess.DEVNULL if quiet else sys.stderr
    # If this process is killed, nobody shall go on computing and writing: the launcher ends with it, and its workers.
    environment = os.environ | {STARTER_REPORTS: "1"}
    return subprocess.run(launch, cwd=ROOT, stdout=silent, env=environment, preexec_fn=die_with_parent).returncode
