"""A process group that accepts every call and moves nothing: one process plays one rank of several."""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group that accepts every call and moves nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def script(module: str, folder: Path, rank: int, world_size: int, *flags: str, entry: str = "main") -> None:
    """Run the main() of a script for two steps and an evaluation, as one rank on cuda:{rank}."""
    import torch

    from common.config import RunConfig
    from common.workers.process_group import Worker

    @contextlib.contextmanager
    def group(config: RunConfig, join: object = None) -> Iterator[Worker]:
        device = torch.device("cpu") if config.no_cuda else torch.device("cuda", rank % torch.cuda.device_count())
        with joined(rank, world_size) if world_size > 1 else contextlib.nullcontext():
            yield Worker(rank, world_size, device)

    imported = importlib.import_module(module)
    common = ["--max_steps", "2", "--output_dir", str(folder), "--overwrite_output_dir", "--dropout", "0", *flags]
    place = ["--world_size", str(world_size), "--local_rank", str(rank)] if world_size > 1 else []
    words = mock.patch.object(sys, "argv", [module, *common, *(place if entry == "main" else place[:2])])
    batches = Worker.batches
    two = mock.patch.object(Worker, "batches", lambda worker, loader: itertools.islice(batches(worker, loader), 2))
    with mock.patch.object(imported, "process_group", group), words, two:
        if entry == "main":
            imported.main()
        else:  # task 2b's run_gpt2.py starts its processes itself
            imported.run_worker(rank, imported.parse_gpt2_arguments(module.split(".")[0], world_size=world_size))
