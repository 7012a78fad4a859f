"""Lessons, task scripts and the benchmark's engines on fake GPUs: each scene takes one or two steps and evaluates.

DDP's reducer reads the memory of tensors, so tasks 3 run with the bare model in its place. The stages of
torch.distributed.pipelining agree on shapes through messages, which nobody answers here, so of pipeline/distributed.py
only clipping runs. ZeRO-3 runs with the whole model: a model without memory changes the class of its parameters.
"""

from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import benchmark.strategies
from common.models.load import model_path
from common.workers.process_group import Worker
from tests.own.gpu.fake_gpu import fake_gpu, joined, script

ONCE = ("--max_steps", "1")


def small_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config.from_pretrained(model_path("tiny", "gpt2"), n_layer=2))


def flags_of_small_gpt2(folder: Path) -> tuple[str, ...]:
    """Save the model when it is first asked for; return the flags of a script that uses it."""
    if not (folder / "model").exists():
        small_gpt2().save_pretrained(folder / "model")
    return ("--model_name_or_path", str(folder / "model"), "--tokenizer_name", "tiny")


def beyond(folder: Path, *flags: str, ranks: tuple[int, ...] = (1,), world_size: int = 2) -> None:
    import beyond.run_gpt2

    flags += flags_of_small_gpt2(folder)
    for rank in ranks:
        with fake_gpu(world_size), mock.patch.object(beyond.run_gpt2, "from_folder", return_value=None):
            script("beyond.run_gpt2", folder / "out", rank, world_size, *flags)


def task(folder: Path, module: str, world_size: int = 2, entry: str = "main") -> None:
    import task3_ddp.run_glue
    import task3_ddp.run_gpt2

    with without_ddp(task3_ddp.run_glue), without_ddp(task3_ddp.run_gpt2), fake_gpu():
        script(module, folder, world_size - 1, world_size, *ONCE, entry=entry)


def without_ddp(module: ModuleType) -> Any:
    return mock.patch.object(module, "DistributedDataParallel", lambda model, device_ids: model)


def resume(folder: Path, strategy: str) -> None:
    """Each of two ranks saves on its own GPU; the second resumes."""
    shards = str(folder / "shards")
    with torch.serialization.skip_data(materialize_fake_tensors=True):  # the file has shapes and devices
        beyond(folder, "--strategy", strategy, "--save_to", shards, *ONCE, ranks=(0, 1))
    beyond(folder, "--strategy", strategy, "--resume_from", shards)


def pipeline(folder: Path, mode: str, devices: int, *flags: str) -> None:
    flags += flags_of_small_gpt2(folder)
    with fake_gpu(devices):
        script("pipeline.run_gpt2", folder / "out", 0, 1, "--model_parallel_mode", mode, *flags)


def clip_between_processes(folder: Path) -> None:
    """The gradients' norm of a process is read from the GPU once."""
    from pipeline.distributed import PipelinedProcesses

    made = PipelinedProcesses.__new__(PipelinedProcesses)
    made.rank, made.world_size = 0, 1
    with fake_gpu(), mock.patch("torch.distributed.all_gather_object", side_effect=_gather_alone):
        made.parameters = [nn.Parameter(torch.ones(3, 2).to("cuda")) for _ in range(4)]
        made.shared = made.parameters[0]
        for parameter in made.parameters:
            parameter.grad = torch.ones(3, 2).to("cuda")
        with mock.patch("torch._subclasses.fake_tensor.FakeTensor.item", side_effect=AssertionError("one item each")):
            made.clip_gradients(None, 1.0)


def _gather_alone(everyone: list, own: object) -> None:
    everyone[0] = own


def engine(folder: Path, strategy: str, world_size: int = 2) -> None:
    """The first and the last rank of an engine of the benchmark."""
    settings = SimpleNamespace(
        strategy=strategy, precision="fp32", learning_rate=1e-4, adam_epsilon=1e-8, weight_decay=0.1, accumulation=2,
        max_grad_norm=1.0, batch_size=1, world_size=world_size, grid="pipeline=2,tensor=2", bucket_mb=4.0,
        optimizer="adamw",
    )  # fmt: skip
    for rank in sorted({0, world_size - 1}):
        with fake_gpu(1), joined(rank, world_size):
            worker = Worker(rank, world_size, torch.device("cuda", 0))  # each on a node of its own
            model = small_gpt2()
            tested = benchmark.strategies.STRATEGIES[strategy].make(settings, worker, model)  # type: ignore[arg-type]
            tokens = torch.ones(1, 8, dtype=torch.long)
            for _ in range(2):
                for last, batch in enumerate(worker.batches([{"input_ids": tokens, "labels": tokens}] * 2)):
                    tested.backward(tested.forward(batch), last=bool(last))
                tested.step(1e-4)
            tested.validate([{"input_ids": tokens, "labels": tokens}], "gpt2")


STRATEGIES = ("ring", "overlap", "zero1", "tensor")  # zero2 and zero3 are resumed below, 1f1b is an axis of the grids
# One engine of each class: own_overlap holds all, own_zero3 is sharded, own_grid has own_1f1b's and own_tensor's axes.
ENGINES = {"single": 1, "own_overlap": 2, "own_zero3": 2, "own_grid": 4}
GRID = ("--strategy", "grid", "--grid", "pipeline=2,data=2,tensor=2", "--schedule", "gpipe", "--n_chunk", "2")
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
    **{f"resume_{name}": partial(resume, strategy=name) for name in ("zero2", "zero3")},
    "clip_between_processes": clip_between_processes,
    "none": lambda folder: pipeline(folder, "none", 1),
    "model_parallel": lambda folder: pipeline(folder, "model_parallel", 2),
    "pipeline_parallel": lambda folder: pipeline(folder, "pipeline_parallel", 2, "--n_chunk", "2"),
    **{f"engine_{name}": partial(engine, strategy=name, world_size=size) for name, size in ENGINES.items()},
}
