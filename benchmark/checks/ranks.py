"""Runs a function of one of these files on ranks: on loopback, on emulated nodes, or on links that have a delay.

    on_ranks(function, 2, rate="1gbit", size=100)    # what function(config, size=100) returned on each rank, in order

A rank is a process with one thread in a gloo group. What the function returns is handed over as JSON.
"""

import contextlib
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.checks.check import SkippedError
from benchmark.checks.delayed_links import command_on_nodes
from cluster.emulate import on_nodes, why_not
from common.config import RunConfig
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, atomic_write

PATIENCE = datetime.timedelta(seconds=60)  # with a collective that does not come to an end


def on_ranks(
    function: Callable[..., Any],
    workers: int,
    rate: str | None = None,
    delay_ms: float | None = None,
    may_fail: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Return the results in the order of the ranks; with may_fail, those of the ranks that came to the end.

    Raises InputError with the last lines of the output if a rank fails, SkippedError if there are no such links here.
    """
    if rate is not None:
        check_nodes()
    file = Path(function.__code__.co_filename).stem  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "benchmark.checks.ranks", file, function.__name__, json.dumps(arguments)]
        words += ["--output_dir", folder, "--overwrite_output_dir"]
        if delay_ms is not None:
            place = ["--master_ip", "10.10.1.1", "--world_size", str(workers), "--local_rank", "{rank}"]
            command = command_on_nodes(workers, delay_ms, [sys.executable, *words, *place])
        elif rate is not None:
            command = on_nodes(workers, rate, [sys.executable, *words])
        else:
            command = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), "--", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode and not may_fail:
            raise InputError(f"{function.__name__} failed on {workers} ranks: {done.stdout[-1500:]}")
        files = sorted(Path(folder).glob("result_*.json"), key=lambda path: int(path.stem.removeprefix("result_")))
        return [json.loads(path.read_text()) for path in files]


def check_nodes() -> None:
    """Raises SkippedError if this machine cannot emulate nodes."""
    if reason := why_not():
        raise SkippedError(reason)


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    from common.arguments import parse_worker_arguments
    from common.workers.collectives import turn_on_recorder
    from common.workers.process_group import choose_interface

    file, name, arguments, *flags = sys.argv[1:]
    config: RunConfig = parse_worker_arguments("benchmark_checks", flags)
    torch.set_num_threads(1)
    turn_on_recorder()
    choose_interface(config.master_ip)
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group("gloo", address, PATIENCE, config.world_size, config.rank)
    result = getattr(importlib.import_module(f"benchmark.checks.{file}"), name)(config, **json.loads(arguments))
    with atomic_write(config.output_dir / f"result_{config.rank}.json") as kept:
        json.dump(result, kept)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a group that has lost a rank would wait for it


if __name__ == "__main__":
    exit_on_input_error(main)
