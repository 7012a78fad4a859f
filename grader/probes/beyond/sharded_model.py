"""Runs a student's sharded blocks and sharded model on toys whose gradients are drawn, and leads one rank behind.

What a use of a parameter adds to the loss, and its gradient, depend on the parameter's values: who computes with other
values than those that all ranks have together gets another loss. A gradient is multiplied by a permit, a number that
backward asks the grader for when it comes to this use, and a block's output needs one, too. So the grader knows what
was sent before a block had computed, and what after.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader.inside.context import Context
from grader.inside.tools import held_back
from grader.wire.values import Fields

BEGIN = -1  # the place of the root before the blocks; after them it is their number
FREED = "its parameters are not in memory"


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage is as large as the tensor: to read one that is freed would end the process."""
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()


def copy(tensor: object) -> Any:
    """A copy that can be sent; None for no tensor, and for one without memory."""
    return tensor.detach().clone() if isinstance(tensor, Tensor) and has_memory(tensor) else None


# --- one block ---


def block(context: Context) -> list[Fields]:
    """Each case of ShardedBlock: make it, gather it with and without start_gather, free it.

    Arguments: file, cases (shapes, dtype), late (the rank that starts its gather when all others have started theirs);
    mine: values ([case][parameter], the same on every rank), moves ([case][0, 1]: what is added to the own shard).
    """
    a = context.arguments
    lesson = context.load(a["file"])
    mine = a["mine"]
    context.join()
    return [_one_case(context, lesson, *case) for case in zip(a["cases"], mine["values"], mine["moves"], strict=True)]


def _one_case(context: Context, lesson: Any, case: dict, values: list[Tensor], moves: list[Tensor]) -> Fields:
    dtype = getattr(torch, case["dtype"])
    parameters = [nn.Parameter(value.to(dtype)) for value in values]
    context.event("make")
    block = lesson.ShardedBlock(parameters)
    found: Fields = {"shard": copy(block.shard.values), "states": [state(block, parameters)], "whole": []}
    found["dtype"] = str(block.shard.values.dtype).removeprefix("torch.")
    if found["shard"] is None or found["shard"].shape != moves[0].shape:
        return found
    for number, move in enumerate(moves):
        with torch.no_grad():
            block.shard.values += move
        if number == 0:
            with held_back(context, context.arguments["late"]):
                context.event("start")
                block.start_gather()
                found["states"].append(state(block, parameters))
                context.event("start again")
                block.start_gather()
        context.event("wait")
        block.wait()
        found["states"].append(state(block, parameters))
        context.event("whole")
        if number == 0:
            block.start_gather()
            block.wait()
        found["whole"].append([copy(parameter) for parameter in parameters])
        context.event("free")
        block.free()
        found["states"].append(state(block, parameters))
    return found


def state(block: Any, parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Bytes that the parameters' memory has, is_whole, and whether a gather is in transit."""
    return [held(parameters), bool(block.is_whole), block.gathering is not None]


def held(parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of memory behind the parameters; what several share counts once."""
    storages = [parameter.untyped_storage() for parameter in parameters]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


# --- the whole model ---


class Use(torch.autograd.Function):
    """h plus half the sum of weight * weight * coefficient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, use: "Used") -> Tensor:
        use.toy.must_be_whole(weight, "forward", use.place)
        ctx.save_for_backward(weight)
        ctx.use = use
        return h + (weight.double().square() * use.coefficient).sum() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,), use = ctx.saved_tensors, ctx.use
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        if use.opens:
            use.toy.arrive("backward", use.place)
        use.toy.must_be_whole(weight, "backward", use.place)
        permit = use.toy.later(f"{use.toy.now} backward {use.number}")
        return gradient, (weight.double() * use.coefficient * permit * gradient).to(weight.dtype), None


class Used:
    """One use of a parameter. `opens`: backward of this place begins with it."""

    def __init__(self, toy: "BlocksToy", number: int, place: int, coefficient: Tensor, opens: bool) -> None:
        self.toy, self.number, self.place, self.coefficient, self.opens = toy, number, place, coefficient, opens


class Block(nn.Module):
    """One block: what it adds, and a permit."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.weights = nn.ParameterList()

    def forward(self, h: Tensor, toy: "BlocksToy") -> Tensor:
        return toy.compute(h, self.place)


class BlocksToy(nn.Module):
    """Blocks with the parameters that `members` says, then the root with the others, in the order of their numbers."""

    def __init__(self, a: Fields, context: Context) -> None:
        super().__init__()
        self.later, self.measure = context.later, context.measure if a["measures"] else None
        self.rank, self.world_size, self.late = context.rank, context.world_size, a["late"]
        self.uses: list[tuple[int, int]] = [(place, k) for place, k in a["uses"]]
        self.depth = len(a["members"])
        self.numbered: list[nn.Parameter] = []
        self.seen: list[list[Any]] = []  # [now, direction, place, bytes of memory of each block and the root]
        self.now, self.coefficients = "", list[Tensor]()
        for k, (value, dtype) in enumerate(zip(a["mine"]["values"], a["dtypes"], strict=True)):
            value = torch.full(a["shapes"][k], float(value)) if value.ndim == 0 else value
            self.numbered.append(nn.Parameter(value.to(getattr(torch, dtype)), k not in a["frozen"]))
        layers = [Block(place) for place in range(self.depth)]
        self.layers = nn.ModuleList(layers)
        for layer, members in zip(layers, a["members"], strict=True):
            layer.weights.extend([self.numbered[k] for k in members])
        inside = {k for members in a["members"] for k in members}
        self.outside = nn.ParameterList([p for k, p in enumerate(self.numbered) if k not in inside])
        self.groups = [[self.numbered[k] for k in group] for group in a["groups"]]

    def forward(self, name: str, coefficients: Sequence[Tensor]) -> Tensor:
        """The loss of a micro-batch, or (without gradients) of an evaluation."""
        self.now, self.coefficients = name, list(coefficients)
        h = self.compute(torch.zeros((), dtype=torch.float64), BEGIN)
        for layer in self.layers:
            h = layer(h, self)
        return self.compute(h, self.depth)

    def compute(self, h: Tensor, place: int) -> Tensor:
        """What the uses of one place add to h, and the permit that is asked for when they have."""
        self.arrive("forward", place)
        mine = [number for number, (at, _) in enumerate(self.uses) if at == place]
        trained = [number for number in mine if self.numbered[self.uses[number][1]].requires_grad]
        for number in mine:
            opens = bool(trained) and number == trained[-1]
            use = Used(self, number, place, self.coefficients[number], opens)
            h = Use.apply(h, self.numbered[self.uses[number][1]], use)
        return h + self.later(f"{self.now} forward {place}")

    def arrive(self, direction: str, place: int) -> None:
        """A block begins to compute: note whose memory is there, measure, and let the late rank follow."""
        self.seen.append([self.now, direction, place, [held(group) for group in self.groups]])
        if self.measure and 0 <= place < self.depth and not self.now.endswith("evaluation"):  # each takes a while
            self.measure(f"{self.now} {direction} {place}")
        if self.late is None or place == self.depth or self.now.endswith("evaluation"):
            return
        others, box = [rank for rank in range(self.world_size) if rank != self.late], torch.zeros(1)
        first, last = (direction, place) == ("forward", BEGIN), (direction, place) == ("backward", BEGIN)
        if self.rank == self.late and not last:
            for other in others:  # each of them has come to the next place
                dist.recv(box, other)
        elif self.rank != self.late and not first:
            dist.send(box, self.late)

    def must_be_whole(self, weight: Tensor, direction: str, place: int) -> None:
        if not has_memory(weight):
            name = f"block {place}" if 0 <= place < self.depth else "the root"
            raise RuntimeError(f"{name} computes in {direction} while {FREED}")


class Momentum:
    """Makes the optimizer of the shards, and keeps it."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum

    def __call__(self, groups: list[dict]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.rate, momentum=self.momentum)


def train(context: Context) -> list[Fields]:
    """Some steps with a ShardedModel; of each step its losses, and the shards before and after.

    Arguments: file, shapes, dtypes, frozen, members, groups (the parameters of each block, then of the root), uses
    ((place, parameter), in order), micros (of each step), evaluate (steps after which the model is used without
    gradients), late (the rank that is one block behind), measures, rate, momentum, decay; finish: whether the student's
    send, receive and finish are called; if not, gradients are taken here, and `moves` are added to the shards instead
    of a step. mine: values (of each parameter, or one number for all its elements), coefficients
    [step][micro-batch][use], evaluations [step][use], moves [step][block].
    """
    a = context.arguments
    measure: Callable[[str], None] = context.measure if a["measures"] else lambda point: None
    measure("start")
    lesson = context.load(a["file"])
    mine = a["mine"]
    context.join()
    toy = BlocksToy(a, context)
    taken: list[list[Any]] = [[None] * len(toy.numbered)]
    if not a["finish"]:
        lesson.ShardedModel.gradient_ready = taking(toy, taken)
    sharded = lesson.ShardedModel(toy, list(toy.layers), Momentum(a["rate"], a["momentum"]), weight_decay=a["decay"])
    blocks = [*sharded.blocks, sharded.root]
    measure("made")
    found = []
    for step, micros in enumerate(a["micros"]):
        kept: Fields = {"losses": [], "local": [], "gradients": [], "lost": False, "evaluation": None}
        for micro in range(micros):
            context.event("micro-batch", step=step, micro=micro)
            loss = toy(f"{step} {micro}", mine["coefficients"][step][micro])
            torch.autograd.backward(loss)
            kept["losses"].append(loss.detach())
            del loss
            context.event("backward ended")
            if a["finish"]:
                sharded.finish()
            else:
                kept["local"].append(taken[0])
                taken[0] = [None] * len(toy.numbered)
                for part in blocks:
                    part.free()
                    if micro + 1 < micros:  # as finish leaves it for the next micro-batch
                        part.shard.gradient = torch.zeros_like(part.shard.values)
        context.event("step ended")
        if a["finish"]:
            measure(f"{step} gradients")
        kept["gradients"] = [None if a["measures"] else copy(part.shard.gradient) for part in blocks]
        kept["left"] = [k for k, parameter in enumerate(toy.numbered) if parameter.grad is not None]
        if a["finish"]:
            sharded.step()
            sharded.zero_grad()
        else:
            with torch.no_grad():
                for part, move in zip(blocks, mine["moves"][step], strict=True):
                    part.shard.values += move
                    part.shard.gradient = None
        measure(f"{step} ended")
        kept["held"] = [held(group) for group in toy.groups]
        if step in a["evaluate"]:
            context.event("evaluation", step=step)
            with torch.no_grad():
                kept["evaluation"] = toy(f"{step} evaluation", mine["evaluations"][step])
            context.event("evaluation ended")
            measure(f"{step} evaluated")
            kept["held after evaluation"] = [held(group) for group in toy.groups]
        kept["values"] = [None if a["measures"] else copy(part.shard.values) for part in blocks]
        kept["dtypes"] = [str(part.shard.values.dtype).removeprefix("torch.") for part in blocks]
        kept["seen"], toy.seen = toy.seen, []
        found.append(kept)
    return found


def taking(toy: BlocksToy, taken: list[list[Any]]) -> Callable[[Any, nn.Parameter], None]:
    """A gradient_ready that keeps each gradient as it is, and frees a block whose gradients are complete."""
    number = {parameter: k for k, parameter in enumerate(toy.numbered)}
    used = {k for _, k in toy.uses}
    waits = [[k for p in group if (k := number[p]) in used] for group in toy.groups]

    def gradient_ready(self: Any, parameter: nn.Parameter) -> None:
        k, small = number[parameter], parameter.numel() < 1 << 16
        taken[0][k] = parameter.grad if small else True
        parameter.grad = None
        for block, group in zip([*self.blocks, self.root], waits, strict=True):
            if k in group and all(taken[0][other] is not None for other in group):
                block.free()

    return gradient_ready
