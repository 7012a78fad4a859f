"""Runs what joins a process group, and what averages gradients, alone: without a training loop around it."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from grader import draws, toys
from grader.probes import Context
from grader.probes_train import make_config


def load(context: Context) -> None:
    """Does the student's file load at all? Argument: file."""
    context.load(context.arguments["file"])


def average(context: Context) -> dict[str, Any]:
    """The student's sync_gradients or average_gradients on drawn gradients.

    Arguments: file, function, mine (this rank's gradients), shapes; frozen, without, strided (numbers of parameters
    that are not trained, have no gradient, or one whose memory is in another order); tied (two layers share the last
    parameter).
    """
    a = context.arguments
    task = context.load(a["file"])
    context.join()
    model = nn.ModuleList([nn.Module(), nn.Module()])
    parameters, mine = [], draws.weight(context.rank)
    for number, value in enumerate(a["mine"]):
        gradient = value.clone()
        parameter = nn.Parameter(torch.full_like(gradient, mine), requires_grad=number not in a["frozen"])
        if number not in [*a["frozen"], *a["without"]]:
            parameter.grad = gradient.t().contiguous().t() if number in a["strided"] else gradient
        model[2 * number // len(a["shapes"])].register_parameter(f"p{number}", parameter)
        parameters.append(parameter)
    if a["tied"]:
        model[0].register_parameter("tied", parameters[-1])
    context.event("begin")
    if a["function"] == "sync_gradients":
        task.sync_gradients(model, context.world_size)
    else:
        task.average_gradients(model)
    moved = [number for number, parameter in enumerate(parameters) if bool((parameter != mine).any())]
    return {"grads": [parameter.grad for parameter in parameters], "moved": moved}


def wrap(context: Context) -> dict[str, Any]:
    """wrap(model, worker) of a toy, then one backward pass. Arguments: file, kind, seed, count (examples per rank)."""
    a = context.arguments
    task = context.load(a["file"])
    context.join()
    from common.process_group import Worker

    glue = a["kind"] == "classifier"
    weights = (draws.classifier if glue else draws.language_model)(a["seed"], a["count"] * context.world_size)
    model = (toys.Classifier if glue else toys.LanguageModel)(
        {name: torch.from_numpy(weight) for name, weight in weights.items()}, context.event
    )
    wrapped = task.wrap(model, Worker(context.rank, context.world_size))
    context.event("begin")
    ids, labels = (torch.from_numpy(x) for x in draws.examples(a["seed"], a["count"], a["count"] * context.rank))
    torch.autograd.backward(wrapped(input_ids=ids, labels=labels if glue else ids).loss)
    ddp = isinstance(wrapped, nn.parallel.DistributedDataParallel)
    grads = {name: parameter.grad for name, parameter in toys.by_name(model.parameters()).items()}
    return {"grads": grads, "ddp": ddp, "class": type(wrapped).__name__}


def join(context: Context) -> dict[str, Any]:
    """join(config) of a run_glue.py. Arguments: file, config."""
    task = context.load(context.arguments["file"])
    task.join(make_config(context, "GlueConfig", **context.arguments["config"]))
    return {"joined": dist.is_initialized()}


def setup(context: Context) -> dict[str, Any]:
    """setup(rank, world_size, backend) of task 2b's run_gpt2.py. Arguments: file, backend, environment."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(context.arguments["environment"])
    task = context.load(context.arguments["file"])
    task.setup(context.rank, context.world_size, context.arguments["backend"])
    return {"joined": dist.is_initialized()}
