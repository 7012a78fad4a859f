"""Runs a student's sharded optimizer on a toy whose gradients are drawn; see overlap for the toy and its permits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from grader.inside.context import Context
from grader.probes.beyond.overlap import Toy
from grader.wire import tags
from grader.wire.values import Fields


class ToyOptimizer:
    """A toy and the student's ShardedOptimizer of it.

    Arguments: file, shapes, dtypes, frozen, tied, blocks (lists of parameters), stage, optimizer (a name of
    torch.optim), options (of it), weight_decay; mine: values, of each parameter.
    """

    def __init__(self, context: Context) -> None:
        a = context.arguments
        lesson = context.load(a["file"])
        self.mine = a["mine"]
        context.join()
        self.context, self.late, self.box = context, a["late"], torch.zeros(1)
        self.toy = Toy(a, self.later)
        for parameter, value in zip(self.toy.numbered, self.mine["values"], strict=True):
            parameter.data.copy_(value)
        blocks = [nn.ModuleList([self.toy.layers[k] for k in block]) for block in a["blocks"]]
        self.made: list[Optimizer] = []
        decay = {"weight_decay": a["weight_decay"], "stage": a["stage"]}
        self.optimizer = lesson.ShardedOptimizer(self.toy, blocks, self._make(a["optimizer"], a["options"]), **decay)

    def _make(self, name: str, options: Fields) -> Any:
        def make_optimizer(groups: list[dict]) -> Optimizer:
            self.made.append(getattr(torch.optim, name)(groups, **options))
            return self.made[-1]

        return make_optimizer

    def later(self, key: str) -> Tensor:
        """A permit. Rank `late` gets it when all others have asked for the next one, or have ended backward."""
        self.meet()
        return self.context.later(key)

    def meet(self, leads: bool = True, follows: bool = True) -> None:
        ranks = [] if self.late is None else range(self.context.world_size)
        for other in ranks:
            if follows and self.context.rank == self.late != other:
                dist.recv(self.box, other, tag=tags.OURS)
            elif leads and self.context.rank != self.late == other:
                dist.send(self.box, other, tag=tags.OURS)

    def state_elements(self) -> int:
        """The elements of all optimizer states; counters of steps aside."""
        states = [state for optimizer in self.made for state in optimizer.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() for tensor in tensors if tensor.dim())

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.toy.numbered]


def backward(context: Context) -> Fields:
    """Some steps of backward and finish, with a stage's number of finishes, and no optimizer step.

    Arguments: micros (of each step, how many micro-batches), late (the rank that is one gradient behind, or None);
    mine: uses and gradients, [step][micro-batch].
    """
    a = context.arguments
    sharded = ToyOptimizer(context)
    owns, finishes = owned(sharded), []
    for step, micros in enumerate(a["micros"]):
        for micro in range(micros):
            last = micro == micros - 1
            run_backward(context, sharded, step, micro)
            if a["stage"] == 2 or last:
                sharded.optimizer.finish()
                context.event("finished")
                finishes.append({
                    "step": step, "micro": micro,
                    "gradients": [described(bucket.shard.gradient) for bucket in sharded.optimizer.buckets],
                    "left": [k for k, p in enumerate(sharded.toy.numbered) if p.grad is not None],
                })  # fmt: skip
        sharded.optimizer.zero_grad()
    return {"own": owns, "finishes": finishes, "parameters": sharded.parameters()}


def run_backward(context: Context, sharded: ToyOptimizer, step: int, micro: int) -> None:
    """One micro-batch, between the events "backward" and "backward ended"."""
    context.event("backward", step=step, micro=micro)
    uses, gradients = (sharded.mine[name][step][micro] for name in ("uses", "gradients"))
    loss = sharded.toy(f"{step} {micro}", uses, gradients)
    sharded.meet(leads=False)
    torch.autograd.backward(loss)
    sharded.meet(follows=False)
    context.event("backward ended")


def owned(sharded: ToyOptimizer) -> Fields:
    """Each rank's shards at the start, and the parameters while 1 is added to every shard."""
    shards = [bucket.shard for bucket in sharded.optimizer.buckets]
    told = [described(shard.values) for shard in shards]
    kept = [shard.values.clone() for shard in shards]
    with torch.no_grad():
        for shard in shards:
            shard.values += 1
        raised = sharded.parameters()
        for shard, values in zip(shards, kept, strict=True):
            shard.values.copy_(values)
    return {"shards": told, "raised": raised}


def described(value: object) -> Fields:
    """A tensor with its dtype, or the name of what is none."""
    if not isinstance(value, torch.Tensor):
        return {"type": type(value).__name__}
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.detach().clone()}


def clip(context: Context) -> list[Fields]:
    """clip() of gradients that each rank is told for its shards. Arguments: limits; mine: shards, [case][bucket]."""
    sharded = ToyOptimizer(context)
    found = []
    for limit, gradients in zip(context.arguments["limits"], sharded.mine["shards"], strict=True):
        for bucket, gradient in zip(sharded.optimizer.buckets, gradients, strict=True):
            bucket.shard.gradient = gradient.clone()
        context.event("clip")
        norm = sharded.optimizer.clip(limit)
        context.event("clipped")
        shards = [bucket.shard for bucket in sharded.optimizer.buckets]
        found.append({"norm": described(norm), "gradients": [described(shard.gradient) for shard in shards]})
    return found


def steps(context: Context) -> Fields:
    """Whole steps: backward of all micro-batches, finish, clip, step, zero_grad. Arguments: those of backward; limits.

    Returns of each step the parameters and the shards.
    """
    a = context.arguments
    sharded = ToyOptimizer(context)
    found: list[Fields] = []
    for step, micros in enumerate(a["micros"]):
        for micro in range(micros):
            run_backward(context, sharded, step, micro)
            if a["stage"] == 2 or micro == micros - 1:
                sharded.optimizer.finish()
                context.event("finished")
        if a["limits"][step] is not None:
            context.event("clip")
            sharded.optimizer.clip(a["limits"][step])
            context.event("clipped")
        context.event("step")
        sharded.optimizer.step()
        context.event("stepped")
        sharded.optimizer.zero_grad()
        shards = [described(bucket.shard.values) for bucket in sharded.optimizer.buckets]
        found.append({"parameters": sharded.parameters(), "shards": shards})
    return {"steps": found, "state": sharded.state_elements()}
