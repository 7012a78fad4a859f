"""Runs a student's train() on a toy model and a few examples, and tells of every step what can be seen from outside.

The optimizer is plain SGD and nothing adapts, so a wrong gradient shows in the parameters. Events, in their order:
forward (which examples), clip, step (gradients and parameters before), stepped (parameters after), schedule, loss,
evaluation; the broker's calls stand between them.
"""

import contextlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from grader import draws, toys
from grader.probes import Context

DEFAULTS: dict[str, Any] = {
    "output_dir": Path("out"), "overwrite_output_dir": True, "model_name_or_path": "", "tokenizer_name": "",
    "data_dir": None, "weight_decay": 0.0, "adam_epsilon": 1e-8, "warmup_steps": 0, "max_steps": 0, "dropout": None,
    "no_cuda": True, "profile": False, "backend": "gloo", "join_seconds": 20.0, "hang_seconds": 20.0,
    "master_ip": "127.0.0.1", "master_port": 29500, "learning_rate": 0.1, "max_grad_norm": 0.0, "seed": 1,
    "model_type": "bert", "config_name": "", "task_name": "rte", "do_train": True, "do_eval": True,
    "do_lower_case": False, "max_seq_length": draws.TOKENS, "per_gpu_train_batch_size": 1,
    "per_gpu_eval_batch_size": 3, "num_train_epochs": 1, "overwrite_cache": False, "batch_size": 1, "n_epochs": 1,
    "model_max_length": draws.TOKENS, "pytest": False, "model_parallel_mode": "none", "n_chunk": 1,
    "schedule": "threads",
}  # fmt: skip


def make_config(context: Context, kind: str, **given: Any) -> Any:
    """A GlueConfig or Gpt2Config for this rank."""
    from common import config as configs

    # Every worker on a machine of its own: there node_rank is 0 for all of them.
    place = {"task": "graded", "world_size": context.world_size, "rank": context.rank, "node_rank": 0}
    values = DEFAULTS | place | given
    config = getattr(configs, kind)
    return config(**{field.name: values[field.name] for field in fields(config)})


def glue(context: Context) -> None:
    """train() of a run_glue.py.

    Arguments: file, seed, train and dev (numbers of examples), config, joined, synced, right; see steps.glue.
    """
    a = context.arguments
    watch_library(context)
    task = start(context)
    if not a["synced"]:
        task.sync_gradients = lambda model, world_size: None
    from common.glue import TASKS, Features, GlueData
    from common.process_group import Worker
    from common.record import Record

    def features(count: int, first: int) -> Features:
        ids, labels = (torch.from_numpy(array) for array in draws.examples(a["seed"], count, first))
        return Features(ids, torch.ones_like(ids), torch.zeros_like(ids), labels)

    config = make_config(context, "GlueConfig", **a["config"])
    worker = Worker(context.rank, context.world_size)
    weights = draws.classifier(a["weights_seed"], a["train"] + a["dev"])
    dev = features(a["dev"], a["train"])
    if a["right"] is not None:
        labels = draws.answer(weights, dev.tensors[0].numpy(), a["right"])
        dev = Features(*dev.tensors[:3], torch.from_numpy(labels))
    data = GlueData(TASKS[config.task_name], features(a["train"], 0), dev)
    model = toys.Classifier({name: torch.from_numpy(w) for name, w in weights.items()}, context.event)
    task.train(
        config, worker, wrapped(context, task, model, worker), data, watched_record(context, Record(config, worker))
    )


def gpt2(context: Context) -> None:
    """train() of a run_gpt2.py. Arguments: file, seed, train (blocks on each rank), dev, config."""
    a = context.arguments
    watch_library(context)
    task = start(context)
    from common.process_group import Worker
    from common.record import Record

    def blocks(count: int, first: int) -> list[torch.Tensor]:
        return list(torch.from_numpy(draws.examples(a["seed"], count, first)[0]))

    config = make_config(context, "Gpt2Config", **a["config"])
    worker = Worker(context.rank, context.world_size)
    mine = blocks(a["train"], context.rank * a["train"])
    loader = torch.utils.data.DataLoader(mine, batch_size=config.batch_size // context.world_size)  # type: ignore
    total = a["train"] * context.world_size
    weights = draws.language_model(a["weights_seed"], total + a["dev"])
    model = toys.LanguageModel({name: torch.from_numpy(w) for name, w in weights.items()}, context.event)
    record = watched_record(context, Record(config, worker))
    task.train(config, worker, wrapped(context, task, model, worker), loader, blocks(a["dev"], total), record)


def start(context: Context) -> Any:
    """Load the student's file and join, unless it is a task for one worker."""
    task = context.load(context.arguments["file"])
    if context.arguments["joined"]:
        context.join()
    return task


def wrapped(context: Context, task: Any, model: torch.nn.Module, worker: Any) -> torch.nn.Module:
    """The model as the script's main() hands it to train()."""
    model = task.wrap(model, worker) if hasattr(task, "wrap") else model
    context.event("begin")  # what was sent before is no part of a step
    return model


def snapshot(optimizer: torch.optim.Optimizer, attribute: str) -> dict[str, torch.Tensor | None]:
    """Parameters or gradients, by name, of everything that the optimizer moves."""
    moved = toys.by_name(parameter for group in optimizer.param_groups for parameter in group["params"])
    values = {name: parameter if attribute == "data" else parameter.grad for name, parameter in moved.items()}
    return {name: None if value is None else value.detach().clone() for name, value in values.items()}


def watch_library(context: Context) -> None:
    """Replace what train() uses by watched doubles, before the student's file copies their names."""
    from common import optim

    current: list[torch.optim.Optimizer] = []

    class Sgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rate = self.param_groups[0]["lr"]
            context.event("step", grads=snapshot(self, "grad"), params=snapshot(self, "data"), rate=rate)
            result = super().step(closure)
            context.event("stepped", params=snapshot(self, "data"))
            return result

    class Schedule(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            context.event("schedule", rate=self.get_last_lr()[0])

    def build_optimizer(config: Any, model: torch.nn.Module, steps_per_epoch: int) -> tuple:
        context.event("build", steps_per_epoch=steps_per_epoch)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        current[:] = [Sgd(trainable, lr=config.learning_rate)]
        return current[0], Schedule(current[0], lambda step: 1 / (1 + step))

    optim.build_optimizer = build_optimizer  # type: ignore[assignment]

    def note(*arguments: Any, **keywords: Any) -> dict:
        return {"grads": snapshot(current[0], "grad") if current else {}}

    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        context.spy(module, "clip_grad_norm_", "clip", note)


def watched_record(context: Context, record: Any) -> Any:
    """The real record, which also tells what it is given."""

    def loss(value: Any) -> dict:
        with contextlib.suppress(Exception):
            return {"value": float(value), "tensor": isinstance(value, torch.Tensor)}
        return {"value": float("nan"), "tensor": False}

    def evaluation(epoch: Any, metrics: Any) -> dict:
        plain = {str(name): float(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}
        return {"epoch": epoch if isinstance(epoch, int) else -99, "metrics": plain}

    context.spy(record, "loss", "loss", loss)
    context.spy(record, "evaluation", "evaluation", evaluation)
    return record
