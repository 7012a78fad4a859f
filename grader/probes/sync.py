"""Runs what joins a process group alone: without a script around it."""

import torch
import torch.distributed as dist
from torch import nn

from grader.inside.context import Context
from grader.inside.tools import surroundings
from grader.probes.configs import make_config
from grader.wire.values import Fields


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
