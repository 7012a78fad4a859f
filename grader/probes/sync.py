"""Runs what joins a process group, and what averages gradients, alone: without a training loop around it."""

import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from grader.inside.context import Context
from grader.probes import toys
from grader.probes.train import make_config
from grader.wire import drawn
from grader.wire.values import Fields


def average(context: Context) -> list[Fields]:
    """The student's sync_gradients or average_gradients on this rank's gradients, once for each round.

    Arguments: file, function, mine (round -> this rank's gradients), shapes, dtype; frozen (numbers of parameters that
    are not trained), without (round -> numbers of parameters that have no gradient), tied (two layers share the last
    parameter). Returns of each round: grads, dtypes, moved (parameters that changed), and changed (what else did).
    """
    a = context.arguments
    task = context.load(a["file"])
    context.join()
    dtype = getattr(torch, a["dtype"])
    model = nn.ModuleList([nn.Module(), nn.Module()])
    parameters, mine = [], drawn.weight(context.rank)
    context.scatter()
    for number, shape in enumerate(a["shapes"]):
        parameter = nn.Parameter(torch.full(shape, mine, dtype=dtype), requires_grad=number not in a["frozen"])
        model[2 * number // len(a["shapes"])].register_parameter(f"p{number}", parameter)
        parameters.append(parameter)
    if a["tied"]:
        model[0].register_parameter("tied", parameters[-1])
    rounds = []
    for gradients, without in zip(a["mine"], a["without"], strict=True):
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            left_out = number in a["frozen"] or number in without
            parameter.grad = None if left_out else gradient.to(dtype).clone()
        before = surroundings(model)
        context.event("begin")
        if a["function"] == "sync_gradients":
            task.sync_gradients(model, context.world_size)
        else:
            task.average_gradients(model)
        after = surroundings(model)
        grads = [parameter.grad for parameter in parameters]
        rounds.append({
            "grads": [None if grad is None else grad.detach().clone() for grad in grads],
            "dtypes": [None if grad is None else str(grad.dtype).removeprefix("torch.") for grad in grads],
            "moved": [n for n, parameter in enumerate(parameters) if not bool((parameter == mine).all())],
            "changed": [name for name in before if before[name] != after[name]],
        })  # fmt: skip
    return rounds


def surroundings(model: nn.Module, modules: Sequence[nn.Module] = ()) -> Fields:
    """What a function that averages gradients, or joins or wraps, leaves as it is."""
    return {
        "the state of torch's random generator": torch.get_rng_state().tolist(),
        "the state of Python's random generator": random.getstate(),
        "the state of numpy's random generator": np.random.get_state(legacy=False)["state"]["key"].tolist(),
        "torch's default dtype": str(torch.get_default_dtype()),
        "the mode of the model (train or eval)": [module.training for module in modules or model.modules()],
        "requires_grad of a parameter": [parameter.requires_grad for parameter in model.parameters()],
        "whether gradients are computed": torch.is_grad_enabled(),
        "the process group": dist.is_initialized(),
    }


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
