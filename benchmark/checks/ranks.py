"""Runs a function on ranks of a gloo group, which share the cores of this machine.

    on_ranks(function, 2, rate="1gbit", size=100)    # what function(config, size=100) returned on each rank, in order

Without a rate they are on loopback, with one on emulated nodes. What the function returns is handed over as JSON.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmark.checks.check import SkippedError
from cluster.emulate import on_nodes, why_not
from common.arguments import parse_worker_arguments
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, atomic_write
from common.workers.process_group import choose_interface


def on_ranks(function: Callable[..., Any], workers: int, rate: str | None = None, **arguments: Any) -> list[Any]:
    """Return the results in the order of the ranks.

    Raises InputError with the last lines of the output if a rank fails, SkippedError if this machine has no such links.
    """
    file = Path(function.__code__.co_filename).relative_to(ROOT)  # type: ignore[attr-defined]
    module = ".".join(file.with_suffix("").parts)  # __module__ can be __main__
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "benchmark.checks.ranks", module, function.__name__, json.dumps(arguments)]
        words += ["--output_dir", folder]
        command = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), "--", *words]
        if rate is not None:
            check_nodes()
            command = on_nodes(workers, rate, [sys.executable, *words])
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise InputError(f"{function.__name__} failed on {workers} ranks: {done.stdout[-1500:]}")
        return [json.loads(Path(folder, f"result_{rank}.json").read_text()) for rank in range(workers)]


def check_nodes() -> None:
    """Raise SkippedError if this machine cannot emulate nodes."""
    if reason := why_not():
        raise SkippedError(reason)


def main() -> None:
    """One rank."""
    module, name, arguments, *flags = sys.argv[1:]
    config = parse_worker_arguments("benchmark_checks", [*flags, "--overwrite_output_dir"])
    choose_interface(config.master_ip)
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group("gloo", address, world_size=config.world_size, rank=config.rank)
    result = getattr(importlib.import_module(module), name)(config, **json.loads(arguments))
    with atomic_write(config.output_dir / f"result_{config.rank}.json") as kept:
        json.dump(result, kept)
    dist.barrier()  # a rank that leaves early would break the others' connections
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_input_error(main)
