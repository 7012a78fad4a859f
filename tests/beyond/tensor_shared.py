"""Shared by the lessons of tensor parallelism: ranks in groups, drawn numbers, and the sum over a group."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

from grader.arithmetic import Tolerance
from grader.call_checks import JOINING, ExpectedCall, Phase, all_calls, check_calls, phases
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.ranks.phrases import rank_names


@dataclass(frozen=True)
class Ranks:
    """A number of ranks in groups; without groups, all ranks together."""

    count: int
    groups: tuple[tuple[int, ...], ...] = ()

    def among(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank."""
        return next((group for group in self.groups if rank in group), tuple(range(self.count)))

    def words(self, rank: int) -> str:
        """Return `rank 2 of 4, in the group of ranks 0, 2`."""
        group = ", ".join(map(str, self.among(rank)))
        return f"rank {rank} of {self.count}" + (f", in the group of ranks {group}" if self.groups else "")


ONE, TWO, THREE = Ranks(1), Ranks(2), Ranks(3)
PAIRS = Ranks(4, ((0, 2), (1, 3)))
UNEVEN = Ranks(4, ((0, 1, 3), (2,)))
ALL = (THREE, PAIRS, UNEVEN, ONE)

Index = tuple[slice | list[int] | EllipsisType, ...]  # of a numpy array

SLICED = {  # parameter -> the axis along which it is cut, and the field of Cut with the indices
    "attn.c_attn.weight": (1, "attention"), "attn.c_attn.bias": (0, "attention"),
    "attn.c_proj.weight": (0, "projection"), "mlp.c_fc.weight": (1, "hidden"), "mlp.c_fc.bias": (0, "hidden"),
    "mlp.c_proj.weight": (0, "hidden"),
}  # fmt: skip


@dataclass(frozen=True)
class TensorCut:
    """A block of GPT-2 that is cut for a group: each member's columns of c_attn, rows of the attention's c_proj, and
    columns of c_fc."""

    width: int
    heads: int
    inner: int
    attention: tuple[tuple[int, ...], ...]
    projection: tuple[tuple[int, ...], ...]
    hidden: tuple[tuple[int, ...], ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole block's parameters."""
        width, inner = self.width, self.inner
        return {
            "ln_1.weight": (width,), "ln_1.bias": (width,), "attn.c_attn.weight": (width, 3 * width),
            "attn.c_attn.bias": (3 * width,), "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,), "mlp.c_fc.weight": (width, inner),
            "mlp.c_fc.bias": (inner,), "mlp.c_proj.weight": (inner, width), "mlp.c_proj.bias": (width,),
        }  # fmt: skip

    def indices(self, name: str, member: int) -> list[int]:
        """Return the rows or columns of a parameter that a member of the group has."""
        return list(getattr(self, SLICED[name][1])[member])

    def place(self, name: str, member: int) -> Index:
        """Return an index that takes a member's slice of a parameter of the block."""
        if name not in SLICED:
            return (...,)
        axis, indices = SLICED[name][0], self.indices(name, member)
        return (slice(None), indices) if axis == 1 else (indices,)


HINTS = {  # torch's words -> what they mean here
    "returned an incorrect number of gradients": "backward returns a value for each input of forward, without ctx: the "
    "gradient of x, and None for the group",
    "a gradient different than None at position 2": "return the gradient of x first, then None for the group",
    "not to have been used": "backward returns None for x: return its gradient first, then None for the group",
    "does not require grad": "the result is cut off from the graph: forward computes from x itself, not from x.data "
    "or under no_grad",
    "is out of bounds for dimension": "the weight is (in, out): columns are along its second dimension, rows along the "
    "first",
    "has no attribute 'group'": "keep the group in ctx, in forward: backward gets only ctx and the gradient",
    "a tensor with holes": "all_reduce needs a tensor without holes: make a copy, clone(), and pass that",
    "more than one element of the written-to tensor": "an expanded gradient cannot be written to: make a copy first, "
    "clone(), and pass that to all_reduce",
    "different shapes": "f and g act on what all ranks have: f on x, before the product with the columns; g on the "
    "product with the rows",
}
Given = list[Mapping[str, np.ndarray]]  # the inputs of each rank


def numbers(draw: np.random.Generator, dtype: str, shape: tuple[int, ...], largest: int) -> np.ndarray:
    """Draw numbers; for bfloat16 whole numbers, so that every sum is exact."""
    if dtype == "bfloat16":
        return draw.integers(-largest, largest + 1, shape).astype(np.float64)
    return draw.normal(size=shape).astype(np.float32).astype(np.float64)


def tolerance(dtype: str, slack: float = 1.0) -> Tolerance:
    return Tolerance(total=10.0, slack=slack / 100 if dtype == "float64" else slack)  # sums of numbers around 1


def of_phase(result: Result, rank: int, event: str, of: str) -> list[Phase]:
    """Return the phases of a rank that began with this event, one for each case."""
    return [phase for phase in phases(result, rank) if (phase.event.name, phase.event.data.get("of")) == (event, of)]


def check_sum(
    grade: Grade, where: str, rank: int, phase: Phase, payload: np.ndarray | None, group: tuple[int, ...], advice: str
) -> None:
    """Check that a rank makes one all_reduce of `payload`, or no call for None; a group of one rank needs no call."""
    message = ExpectedCall("all_reduce", payload=payload, payload_is="its own part of the sum", members=group)
    if len(group) > 1 or phase.calls:
        check_calls(grade, where, rank, phase.calls, [] if payload is None else [message], advice)


def check_groups(grade: Grade, result: Result, ranks: Ranks) -> None:
    """Fail if a rank makes a call with other ranks than those of its group."""
    for call in all_calls(result):
        if call.name not in JOINING and set(call.members) != set(ranks.among(call.rank)):
            among = rank_names(call.members)
            grade.fail(
                f"{ranks.words(call.rank)}, calls {call.name} with {among} ({call.where}): pass the group on, to every "
                "function and layer that takes one"
            )


def mistakes_of(direction: str, everyone: Given, given: Given, own: int) -> dict[str, np.ndarray]:
    """Return mistake -> the value that it leaves. `given`: inputs of the group's members; own: this member's place."""
    key = {"forward": "x", "backward": "upstream"}[direction]
    tensors = [one[key] for one in given]
    total = np.sum(tensors, axis=0)
    what = {"forward": "the result", "backward": "the gradient"}[direction]
    return {
        f"{what} is only this rank's tensor; expected the sum over the group": tensors[own],
        f"{what} is the sum over the group; expected what this rank was given, as it is": total,
        f"{what} is the mean; expected the sum": total / len(tensors),
        f"{what} is the sum over all ranks: pass the group on, group=...": np.sum(
            [one[key] for one in everyone], axis=0
        ),
    }
