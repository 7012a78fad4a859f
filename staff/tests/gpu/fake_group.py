"""A process group that accepts every call and moves nothing: one process plays one rank of several."""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.config import RunConfig
from common.workers.process_group import Worker


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of such a group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def script(module: str, folder: Path, rank: int, world_size: int, *flags: str) -> None:
    """Run the main() of a script for two steps and an evaluation of two batches, as one rank on the CPU."""

    @contextlib.contextmanager
    def group(config: RunConfig, join: object = None) -> Iterator[Worker]:
        with joined(rank, world_size):
            yield Worker(rank, world_size)

    imported = importlib.import_module(module)
    place = ["--world_size", str(world_size), "--local_rank", str(rank)]
    argv = [module, "--max_steps", "2", "--output_dir", str(folder), "--overwrite_output_dir", *flags, *place]
    batches = Worker.batches
    two = mock.patch.object(Worker, "batches", lambda worker, loader: itertools.islice(batches(worker, loader), 2))
    with mock.patch.object(imported, "process_group", group), mock.patch.object(sys, "argv", argv), two:
        imported.main()
