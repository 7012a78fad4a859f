"""Runs a student's train() on a toy model and a few examples, and tells of every step what can be seen from outside.

The optimizer is plain SGD and nothing adapts, so a wrong gradient shows in the parameters. Events, in their order:
forward (which examples), clip, step (gradients and parameters before), stepped (parameters after), schedule, loss,
evaluation; the broker's calls are between them. A rank has its own examples and no others, in `mine`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from grader.inside.context import Context, Tell, spy
from grader.probes import toys
from grader.wire import drawn
from grader.wire.values import Fields

# The optimizer is ours and decays no weight: a loop that reads weight_decay or warmup_steps does their work again.
DEFAULTS: Fields = {
    "output_dir": Path("out"), "overwrite_output_dir": True, "model_name_or_path": "", "tokenizer_name": "",
    "data_dir": None, "weight_decay": 0.1, "adam_epsilon": 1e-8, "warmup_steps": 2, "max_steps": 0, "dropout": None,
    "no_cuda": True, "profile": False, "timeline": 0, "check_gradients": False, "backend": "gloo", "join_seconds": 20.0, "hang_seconds": 20.0,
    "master_ip": "127.0.0.1", "master_port": 29500, "learning_rate": 0.1, "max_grad_norm": 0.0, "seed": 1,
    "model_type": "bert", "config_name": "", "task_name": "rte", "do_train": True, "do_eval": True,
    "do_lower_case": False, "max_seq_length": drawn.TOKENS, "per_gpu_train_batch_size": 1,
    "per_gpu_eval_batch_size": 3, "num_train_epochs": 1, "overwrite_cache": False, "batch_size": 1, "n_epochs": 1,
    "model_max_length": drawn.TOKENS, "pytest": False, "model_parallel_mode": "none", "n_chunk": 1,
    "schedule": "threads",
}  # fmt: skip


def make_config(context: Context, kind: str, **given: object) -> Any:
    """A GlueConfig or Gpt2Config for this rank."""
    from common import config as configs

    # Every worker on a machine of its own: there rank_on_node is 0 for all of them.
    place = {"task": "graded", "world_size": context.world_size, "rank": context.rank, "rank_on_node": 0}
    values = DEFAULTS | place | given
    config = getattr(configs, kind)
    return config(**{field.name: values[field.name] for field in fields(config)})


def glue(context: Context) -> None:
    """train() of a run_glue.py.

    Arguments: file, mine (ids and labels of training and dev set, weights), train (how many of them train), config,
    joined, synced; see steps.glue.
    """
    a = context.arguments
    watch_library(context)
    task = start(context)
    if not a["synced"]:
        task.sync_gradients = lambda *_: None
    from common.data.glue import TASKS, Features, GlueData
    from common.record import Record
    from common.workers.process_group import Worker

    def features(part: slice) -> Features:
        ids, labels = a["mine"]["ids"][part], a["mine"]["labels"][part]
        return Features(ids, torch.ones_like(ids), torch.zeros_like(ids), labels)

    config = make_config(context, "GlueConfig", **a["config"])
    worker = Worker(context.rank, context.world_size)
    data = GlueData(TASKS[config.task_name], features(slice(a["train"])), features(slice(a["train"], None)))
    model = toys.Classifier(a["mine"]["weights"], context.event)
    record: Any = watched_record(context.event, Record(config, worker))
    record.dtype, record.sent = torch.float32, []  # what task 4's record has besides
    task.train(config, worker, wrapped(context, task, model, worker), data, record)


def glue_with_correlations(context: Context) -> None:
    """The same for a task whose metrics need scipy, which the zygote loads for the ranks of this probe alone."""
    glue(context)


def gpt2(context: Context) -> None:
    """train() of a run_gpt2.py.

    Arguments: file, mine (ids of this rank's blocks, validation, weights), config, loaded (False: train() makes its
    own loader, as the pipeline's does).
    """
    a = context.arguments
    make_optimizer = watch_library(context)
    task = start(context)
    from common.record import Record
    from common.workers.process_group import Worker

    config = make_config(context, "Gpt2Config", **a["config"])
    worker = Worker(context.rank, context.world_size)
    blocks: Any = list(a["mine"]["ids"])
    loader: Any = torch.utils.data.DataLoader(blocks, batch_size=config.batch_size // context.world_size)
    model = toys.LanguageModel(a["mine"]["weights"], context.event)
    record = watched_record(context.event, Record(config, worker))
    validation = list(a["mine"]["validation"])
    data = (loader, validation) if a["loaded"] else (SimpleNamespace(train=blocks, validation=validation),)
    wrapped_model = wrapped(context, task, model, worker)
    if hasattr(task, "make_strategy"):  # what the bonus lessons average has graders of its own
        from beyond.replicated import Replicated

        optimizer = Replicated(model, lambda: None, lambda groups: make_optimizer(config, model), 0.0)
        data = (optimizer, *data)
    task.train(config, worker, wrapped_model, *data, record)


def start(context: Context) -> Any:
    """Load the student's file and join, unless it is a task for one worker."""
    task = context.load(context.arguments["file"])
    if context.arguments["joined"]:
        context.join()
    return task


def wrapped(context: Context, task: object, model: torch.nn.Module, worker: object) -> torch.nn.Module:
    """The model as the script's main() hands it to train()."""
    model = task.wrap(model, worker) if hasattr(task, "wrap") else model
    context.event("begin")  # what was sent before is no part of a step
    return model


def snapshot(optimizer: torch.optim.Optimizer, attribute: str) -> dict[str, torch.Tensor | None]:
    """Parameters or gradients, by name, of everything that the optimizer moves."""
    moved = toys.by_name(parameter for group in optimizer.param_groups for parameter in group["params"])
    values = {name: parameter if attribute == "data" else parameter.grad for name, parameter in moved.items()}
    return {name: None if value is None else value.detach().clone() for name, value in values.items()}


def watch_library(context: Context) -> Callable[[Any, torch.nn.Module], torch.optim.Optimizer]:
    """Replace what train() uses by watched doubles, before the student's file copies their names.

    Returns the function that makes the optimizer of (config, model).
    """
    from common import optim
    from task2b_allreduce import worker_gradients

    event = context.event  # and not the context, which the doubles below would lead to

    current: list[torch.optim.Optimizer] = []

    class Sgd(torch.optim.SGD):
        """Counts its steps where AdamW keeps its moments: who clears them clears the count."""

        def moved(self) -> list[torch.Tensor]:
            return [parameter for group in self.param_groups for parameter in group["params"]]

        def remembered(self) -> int:
            return min((self.state[parameter].get("steps", 0) for parameter in self.moved()), default=0)

        def step(self, closure: object = None) -> Any:
            rate, remembered = self.param_groups[0]["lr"], self.remembered()
            event("step", grads=snapshot(self, "grad"), params=snapshot(self, "data"), rate=rate, remembered=remembered)
            result = super().step(closure)
            for parameter in self.moved():
                self.state[parameter]["steps"] = remembered + 1
            event("stepped", params=snapshot(self, "data"))
            return result

    class Schedule(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            event("schedule", rate=self.get_last_lr()[0])

    def make_optimizer(config: Any, model: torch.nn.Module) -> Sgd:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        current[:] = [Sgd(trainable, lr=config.learning_rate)]
        return current[0]  # type: ignore[return-value]

    def build_optimizer(config: object, model: torch.nn.Module, steps_per_epoch: int) -> tuple:
        optimizer = make_optimizer(config, model)
        return optimizer, build_schedule(config, optimizer, steps_per_epoch)

    def build_schedule(config: object, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> LambdaLR:
        event("build", steps_per_epoch=steps_per_epoch)
        return Schedule(optimizer, lambda step: 1 / (1 + step))

    optim.build_optimizer = build_optimizer  # type: ignore[assignment]
    optim.build_schedule = build_schedule  # type: ignore[assignment]

    def note(parameters: Any, max_norm: Any, *arguments: Any, **keywords: Any) -> dict:
        return {"grads": snapshot(current[0], "grad") if current else {}, "limit": float(max_norm)}

    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        context.spy(module, "clip_grad_norm_", "clip", note)

    def keep_gradients(model: torch.nn.Module, rank: int) -> None:
        event("kept", grads=snapshot(current[0], "grad") if current else {}, rank=rank)

    worker_gradients.keep_gradients = keep_gradients  # which would write into the repository
    return make_optimizer


def watched_record(tell: Tell, record: Any) -> Any:
    """The real record, which also tells what it is given."""

    def loss(value: Any) -> dict:
        with contextlib.suppress(Exception):
            return {"value": float(value), "kind": kind_of(value)}
        return {"value": float("nan"), "kind": kind_of(value)}

    def evaluation(epoch: object, metrics: object) -> dict:
        plain, kinds = {}, [kind_of(epoch, int)]
        for name, value in (metrics if isinstance(metrics, dict) else {}).items():
            kinds.append(kind_of(value))
            with contextlib.suppress(Exception):
                plain[str(name)] = float(value)
        return {"epoch": epoch if isinstance(epoch, int) else -99, "metrics": plain, "kinds": kinds}

    spy(tell, record, "loss", "loss", loss)
    spy(tell, record, "evaluation", "evaluation", evaluation)
    return record


def kind_of(value: object, *allowed: type) -> str:
    """ "" for a number that the record can write as JSON, else the name of its type."""
    return "" if isinstance(value, allowed or (int, float)) else type(value).__name__
