"""Measures the memory of a student's sharded optimizer, with large parameters and an optimizer that has state."""

from functools import partial

import torch
from torch import nn

from grader.inside.context import Context


def steps(context: Context) -> None:
    """Some steps with Adam on gradients of ones, one block after the other; with stage 2 without the optimizer's step.

    Arguments: file, shapes (of each block's only parameter), stage, steps, measures.
    """
    a = context.arguments
    context.measure("start")
    lesson = context.load(a["file"])
    context.join()
    model = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(shape))]) for shape in [*a["shapes"], [3]]])
    blocks = list(model)[:-1]
    sharded = lesson.ShardedOptimizer(model, blocks, partial(torch.optim.Adam, lr=0.01), stage=a["stage"])
    context.measure("made")
    for step in range(a["steps"]):
        for block in [*reversed(blocks), model[-1]]:
            next(block.parameters()).sum().backward()
        context.measure(f"{step} backward")
        sharded.finish()
        context.measure(f"{step} gradients")
        if a["stage"] == 1:
            sharded.step()
        sharded.zero_grad()
        context.measure(f"{step} ended")
