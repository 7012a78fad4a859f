"""Runs a script of the course inside the test's process: no process starts, so a run costs a third of a second.

`run` is the command on one worker, with a real process group where the script joins one. `joined` and `script` are for
one of several ranks alone: its group accepts every call and moves nothing, so what it computes is its own part only.
"""

import contextlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cluster.launch import free_port
from common.config import RunConfig
from common.paths import ROOT, import_file
from common.workers.process_group import Worker


@contextlib.contextmanager
def command(*words: object) -> Iterator[None]:
    """Inside, this process was started with these words; threads and environment are as before at the end."""
    threads = torch.get_num_threads()
    own = {"OMP_NUM_THREADS": "1"}  # threads of a busy machine wait for each other
    torch.set_num_threads(1)
    with mock.patch.object(sys, "argv", [str(word) for word in words]), mock.patch.dict(os.environ, own):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def run(script: Path | str, folder: Path, *flags: object) -> dict[str, Any]:
    """Run a script on one worker, with its record in `folder`; return the record."""
    module = import_file(ROOT / script, Path(script).stem)
    place = ["--output_dir", folder, "--no_cuda", "--master_port", free_port()]
    with command(script, *flags, *place):
        if hasattr(module, "start_workers"):  # task 2b's run_gpt2.py starts a process for each worker; here, this one
            with command(script, *flags, *place, "--world_size", 1):
                module.run_worker(0, module.parse_gpt2_arguments("task2b_allreduce", world_size=2))
        else:
            module.main()
    return json.loads((folder / "rank0.json").read_text())


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group that accepts every call and moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def script(module: str, folder: Path, rank: int, world_size: int, *flags: object) -> None:
    """Run the main() of a script for two steps and an evaluation, as one rank of such a group."""

    @contextlib.contextmanager
    def group(config: RunConfig, join: object = None) -> Iterator[Worker]:
        with joined(rank, world_size):
            yield Worker(rank, world_size)

    imported = importlib.import_module(module)
    place = ["--world_size", world_size, "--local_rank", rank, "--output_dir", folder, "--overwrite_output_dir"]
    batches = Worker.batches
    two = mock.patch.object(Worker, "batches", lambda worker, loader: itertools.islice(batches(worker, loader), 2))
    with command(module, "--max_steps", 2, *flags, *place), two, mock.patch.object(imported, "process_group", group):
        imported.main()
