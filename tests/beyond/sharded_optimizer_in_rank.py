"""A toy with a student's sharded optimizer; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dtype_of, hold, release
    from grader.wire.values import Fields
    from tests.beyond.toy_in_rank import Toy, run_backward


class ShardedToy:
    """A toy and the student's ShardedOptimizer for it.

    Arguments: those of the toy, blocks (lists of parameters), stage, optimizer (a name of torch.optim), its options,
    weight_decay, late (the rank that is one gradient behind, or None); inputs: values (of each parameter).
    """

    def __init__(self, context: Context, lesson: ModuleType, inputs: Fields) -> None:
        arguments = context.arguments
        self.context, self.inputs, self.late = context, inputs, arguments["late"]
        self.toy = Toy(arguments, self.reached)
        for parameter, value in zip(self.toy.numbered, inputs["values"], strict=True):
            parameter.data.copy_(value)
        blocks = [nn.ModuleList([self.toy.layers[k] for k in block]) for block in arguments["blocks"]]

        def make_optimizer(groups: list[Fields]) -> Optimizer:
            return getattr(torch.optim, arguments["optimizer"])(groups, **arguments["options"])

        options = {"weight_decay": arguments["weight_decay"], "stage": arguments["stage"]}
        self.optimizer = lesson.ShardedOptimizer(self.toy, blocks, make_optimizer, **options)

    def reached(self, key: str) -> None:
        """Note a gradient. Rank `late` goes on when all others have reached the next one, or have ended backward."""
        hold(self.context, self.late)
        release(self.context, self.late)
        self.context.event("reached", key=key)

    def run_step(self, step: int) -> Iterator[int]:
        """Run backward of all micro-batches; yield its number after each finish(), which stage 1 calls once a step."""
        micros = len(self.inputs["uses"][step])
        for number in range(micros):
            run_backward(self.context, self.toy, self.inputs, step, number, self.late)
            if self.context.arguments["stage"] == 2 or number == micros - 1:
                self.optimizer.finish()
                self.context.event("finished")
                yield number

    def shards(self) -> list[Any]:
        return [bucket.shard for bucket in self.optimizer.buckets]

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.toy.numbered]


def described(name: str, values: Sequence[object]) -> Fields:
    """Return the tensor of each bucket, and its dtype."""
    tensors = {f"{name} {i}": copy_of(value) for i, value in enumerate(values)}
    return tensors | {f"{name} {i}'s dtype": dtype_of(value) for i, value in enumerate(values)}
