"""Models for a student's sharded blocks; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, hold, release
    from grader.wire.values import Fields
    from tests.beyond.sharded_optimizer_memory import ends
    from tests.beyond.toy_in_rank import Toy

BEGIN = -1  # the place of the root before the blocks; after them it is their number


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether the storage is as large as the tensor: reading a freed one would end the process."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def copy_in_memory(value: object) -> Tensor | None:
    """Return a copy of a tensor; None for a tensor without memory, and for anything else."""
    return copy_of(value) if isinstance(value, Tensor) and is_in_memory(value) else None


def piece_of(sharded: Any, parameter: Tensor) -> Any:
    """Return the student's block that a parameter belongs to."""
    return next(piece for piece in sharded.pieces if parameter in set(piece.flat.parameters))


def bytes_of(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of memory of some parameters; shared memory counts once."""
    storages = [parameter.untyped_storage() for parameter in parameters]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class ToyBlock(nn.Module):
    """A block of the toy."""

    def __init__(self, layers: Sequence[nn.Module], compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.compute = nn.ModuleList(layers), compute

    def forward(self, h: Tensor) -> Tensor:
        return self.compute(h)


class BlocksToy(nn.Module):
    """A toy that computes block by block. It notes the values of parameters, and which blocks are in memory.

    It also notes when a block has computed, and when backward reaches each of its uses. Arguments: those of the toy,
    blocks (lists of parameters), places (for each use: a block, or the root before (-1) or after the blocks), late
    (the rank that is one key behind, or None); inputs: values (of each parameter), uses.
    """

    def __init__(self, context: Context, inputs: Fields) -> None:
        arguments = context.arguments
        super().__init__()
        self.toy = Toy(arguments, self.reached)
        self.context, self.late = context, arguments["late"]
        self.uses, self.places = inputs["uses"][0][0], arguments["places"]  # the same in every micro-batch
        for parameter, value in zip(self.toy.numbered, inputs["values"], strict=True):
            parameter.data.copy_(value)
        self.blocks = [self._block(place, members) for place, members in enumerate(arguments["blocks"])]
        self.sharded: Any = None  # the student's model, once it is built
        self.notes: Fields = {}

    def _block(self, place: int, members: Sequence[int]) -> ToyBlock:
        return ToyBlock([self.toy.layers[k] for k in members], lambda h: self.compute(place, h))

    def reached(self, key: str) -> None:
        """Note a key. Rank `late` goes on when all others have reached the next one, or have ended backward."""
        if torch.is_grad_enabled() or "forward" not in key:  # not in an evaluation
            if not key.endswith(f"forward {BEGIN}"):
                release(self.context, self.late)
            hold(self.context, self.late)
        self.context.event("reached", key=key)

    def forward(self, name: str, gradients: Sequence[Tensor]) -> Tensor:
        """Return a loss, as the toy does."""
        self.name, self.gradients, self.notes = name, gradients, {}
        h = self.compute(BEGIN, torch.zeros((), dtype=torch.float64))
        for block in self.blocks:
            h = block(h)
        return self.compute(len(self.blocks), h)

    def compute(self, place: int, h: Tensor) -> Tensor:
        """Return h plus what the uses of one place add to it."""
        self.note_memory("forward", place)
        for use in (use for use, at in enumerate(self.places) if at == place):
            self.note_values("forward", use)
            weight = self.toy.numbered[self.uses[use]].view_as(self.toy.numbered[self.uses[use]])
            if weight.requires_grad:
                weight.register_hook(self._in_backward(use))
            h = h + (weight * self.gradients[use].to(weight.dtype)).sum().double()
        self.reached(f"{self.name} forward {place}")
        return h

    def _in_backward(self, use: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.note_memory("backward", self.places[use])
            self.note_values("backward", use)
            self.reached(f"{self.name} {use}")

        return hook

    def place_name(self, place: int) -> str:
        return f"block {place}" if 0 <= place < len(self.blocks) else "the root"

    def note_values(self, direction: str, use: int) -> None:
        """Note the values of a parameter, if it is sharded."""
        parameter, where = self.toy.numbered[self.uses[use]], self.place_name(self.places[use])
        if not parameter.requires_grad:
            return
        if not is_in_memory(parameter):
            raise RuntimeError(f"{where} computes in {direction} while its parameters are not in memory")
        if piece_of(self.sharded, parameter).gathering is not None:
            raise RuntimeError(f"{where} computes in {direction} while its parameters are still on their way")
        self.notes[f"{direction} {use}"] = copy_of(parameter)

    def note_memory(self, direction: str, place: int) -> None:
        """Note which blocks are in memory when a place begins to compute."""
        self.notes.setdefault(f"{direction} at {place}", self.in_memory())

    def in_memory(self) -> str:
        pieces = [*enumerate(self.sharded.blocks), (len(self.blocks), self.sharded.root)]
        names = [self.place_name(i) for i, piece in pieces if bytes_of(piece.flat.parameters)]
        return ", ".join(names) or "nothing"


def take_gradients_here(lesson: ModuleType, used: Callable[[Any], int]) -> None:
    """Stand in for b.10, so that b.9 is graded alone: drop each gradient, and free a block when its last one is there.

    Call it before the ShardedModel is made, which registers the hook.
    used: a function that returns how many parameters of a block get a gradient in backward.
    """
    left: dict[object, int] = {}

    def gradient_ready(self: object, parameter: nn.Parameter) -> None:
        parameter.grad = None
        piece = piece_of(self, parameter)
        left[piece] = (left.get(piece) or used(piece)) - 1  # 0 or nothing: a new backward begins
        if left[piece] == 0:
            piece.free()

    lesson.ShardedModel.gradient_ready = gradient_ready


class MeasuredModel(nn.Module):
    """Blocks of one matrix, and a root. Memory is measured when a block begins to compute, in both directions.

    factors: the gradients of each step's blocks; ends: the smallest and largest value of what each has computed with.
    """

    def __init__(
        self, shape: Sequence[int], factors: Sequence[Sequence[float]], measure: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.measure, self.factors = measure, factors
        self.ends: list[list[float]] = []
        self.root = nn.Parameter(torch.ones(3))
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(shape)) for _ in factors[0]])
        self.blocks = [self._block(i) for i in range(len(factors[0]))]

    def _block(self, i: int) -> ToyBlock:
        return ToyBlock([nn.ParameterList([self.weights[i]])], lambda h: self.compute(i, h))

    def forward(self, step: int) -> Tensor:
        self.step, h = step, self.root.sum()
        for block in self.blocks:
            h = block(h)
        return h

    def compute(self, i: int, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # a measurement takes a while
            self.ends += ends([self.weights[i]])
            return h + self.weights[i].sum()

        def note(direction: str) -> None:
            self.measure(f"{self.step} {direction} {i}")
            self.ends.extend(ends([self.weights[i]]))

        note("forward")
        h = h + self.weights[i].sum() * self.factors[self.step][i]
        h.register_hook(lambda gradient: note("backward"))
        return h
