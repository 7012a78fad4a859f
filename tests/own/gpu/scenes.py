"""The lessons and the task scripts on fake GPUs: each scene runs a script for two steps and an evaluation.

DDP's reducer reads the memory of tensors, so tasks 3 run with the bare model in its place. The stages of
torch.distributed.pipelining agree on shapes through messages, which nobody answers here, so of pipeline/distributed.py
only clipping runs. ZeRO-3 runs with the whole model: a model without memory changes the class of its parameters.
"""

from functools import partial
from pathlib import Path
from unittest import mock

import torch

from tests.own.gpu.fake_gpu import fake_gpu, script


def beyond(folder: Path, *flags: str, ranks: tuple[int, ...] = (0, 1), world_size: int = 2) -> None:
    import beyond.run_gpt2

    for rank in ranks:
        with fake_gpu(world_size), mock.patch.object(beyond.run_gpt2, "from_folder", lambda *_: None):
            script("beyond.run_gpt2", folder, rank, world_size, *flags)


def task(folder: Path, module: str, world_size: int = 2, entry: str = "main") -> None:
    import task3_ddp.run_glue
    import task3_ddp.run_gpt2

    with contextlib_bare(task3_ddp.run_glue), contextlib_bare(task3_ddp.run_gpt2), fake_gpu():
        script(module, folder, world_size - 1, world_size, entry=entry)


def contextlib_bare(module):
    return mock.patch.object(module, "DistributedDataParallel", lambda model, device_ids: model)


def resume(folder: Path, strategy: str) -> None:
    """Each of two ranks saves on its own GPU; both resume."""
    shards = str(folder / "shards")
    with torch.serialization.skip_data(materialize_fake_tensors=True):  # the file has shapes and devices
        beyond(folder, "--strategy", strategy, "--save_to", shards)
    beyond(folder, "--strategy", strategy, "--resume_from", shards)


def pipeline(folder: Path, mode: str, devices: int) -> None:
    with fake_gpu(devices):
        script("pipeline.run_gpt2", folder, 0, 1, "--model_parallel_mode", mode)


STRATEGIES = ("ring", "overlap", "zero1", "zero2", "zero3", "tensor", "1f1b")
GRID = ("--strategy", "grid", "--grid", "pipeline=2,data=2,tensor=2", "--schedule", "gpipe")
SCENES = {
    "task1": partial(task, module="task1_single.run_glue", world_size=1),
    "task2a": partial(task, module="task2a_gather_scatter.run_glue"),
    "task2b": partial(task, module="task2b_allreduce.run_glue"),
    "task2b_gpt2": partial(task, module="task2b_allreduce.run_gpt2", entry="run_worker"),
    "task3": partial(task, module="task3_ddp.run_glue"),
    "task3_gpt2": partial(task, module="task3_ddp.run_gpt2"),
    "task4": partial(task, module="task4_traffic.run_glue"),
    **{name: partial(lambda folder, name: beyond(folder, "--strategy", name), name=name) for name in STRATEGIES},
    "grid": lambda folder: beyond(folder, *GRID, ranks=(0, 7), world_size=8),
    **{f"resume_{name}": partial(resume, strategy=name) for name in ("zero1", "zero2", "zero3")},
    **{
        f"{mode}_{devices}": partial(pipeline, mode=mode, devices=devices)
        for mode in ("none", "model_parallel", "pipeline_parallel")
        for devices in (1, 2)
    },
}
