"""Runs what joins a process group, and what wraps a model, alone: without a training loop around it."""

import torch
import torch.distributed as dist
from torch import nn

from grader.inside.context import Context
from grader.inside.tools import surroundings
from grader.probes import toys
from grader.probes.train import make_config
from grader.wire.values import Fields


def wrap(context: Context) -> Fields:
    """wrap(model, worker) of a toy, then one backward pass. Arguments: file, kind, mine (weights, ids and labels)."""
    a = context.arguments
    task = context.load(a["file"])
    context.join()
    from common.workers.process_group import Worker

    mine, glue = a["mine"], a["kind"] == "classifier"
    model = (toys.Classifier if glue else toys.LanguageModel)(mine["weights"], context.event)
    modules = list(model.modules())  # wrapped parts add modules of their own
    before = surroundings(model, modules)
    wrapped = task.wrap(model, Worker(context.rank, context.world_size))
    after = surroundings(model, modules)
    context.event("begin")
    labels = mine["labels"] if glue else mine["ids"]
    torch.autograd.backward(wrapped(input_ids=mine["ids"], labels=labels).loss)
    return {
        "grads": {name: parameter.grad for name, parameter in toys.by_name(model.parameters()).items()},
        "ddp": any(isinstance(module, nn.parallel.DistributedDataParallel) for module in wrapped.modules()),
        "class": type(wrapped).__name__,
        "changed": [name for name in before if before[name] != after[name]],
    }


def join(context: Context) -> Fields:
    """join(config) of a run_glue.py. Arguments: file, config, mine (this rank's number, see `meet`)."""
    task = context.load(context.arguments["file"])
    before = surroundings(nn.Module())
    task.join(make_config(context, "GlueConfig", **context.arguments["config"]))
    after = surroundings(nn.Module()) | {"the process group": False}
    changed = [name for name in before if before[name] != after[name]]
    return {"joined": dist.is_initialized(), "changed": changed, "sums": meet(context)}


def meet(context: Context) -> list[torch.Tensor]:
    """Every rank's number, summed over the group that was joined and over one made of it; none where none was joined.

    A group that works is one of torch's. That one was asked for says nothing.
    """
    sums: list[torch.Tensor] = []
    for make in (lambda: None, dist.new_group) if dist.is_initialized() else ():
        number = context.arguments["mine"].clone()
        dist.all_reduce(number, group=make())
        sums.append(number)
    return sums
