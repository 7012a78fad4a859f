"""Tensor parallelism, b.12: a block of GPT-2 cut by whole heads, against one worker.

Each rank's own slices of a block are correct; all other entries are noise that differs from rank to rank. Transformers'
own block computes the right values, in a rank that loads no student's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import EXACT, Tolerance
from grader.call_checks import ExpectedCall, check_calls, phases
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run, run_alone
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.tensor_shared import HINTS, ONE, PAIRS, SLICED, THREE, TWO, Index, Ranks, TensorCut, check_groups

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, Tensor, copy_of, dtype_of, own_group, torch

graded = pytest.mark.graded
MODELS = ("scripts", "steps", "models")
EXAMPLES, TOKENS = 2, 5
NO_DROPOUT, RESIDUAL, BOTH = (0.0, 0.0), (0.0, 0.5), (0.4, 0.5)  # dropout of the attention, and of the residual
SPLIT = "the attention cuts q, k and v apart by attention.split_size: set it to the columns of this rank's heads"
BLOCK_HINTS = HINTS | {
    "is out of bounds for dimension": "a layer has no such row or column (weight is (in, out)): c_fc has a column for "
    "each hidden unit of the MLP; the attention's c_proj has as many rows as the model is wide",
    "not enough values to unpack": SPLIT,
    "too many values to unpack": SPLIT,
    "cannot be multiplied": "the columns of one layer and the rows of the next do not fit: both are of the same heads, "
    "or of the same hidden units",
}
COLUMNS: tuple[tuple[int, list[int], int, list[int]], ...] = (  # width, heads, head_dim, columns
    (8, [1], 2, [2, 3, 10, 11, 18, 19]),
    (8, [2, 3], 2, [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]),
    (6, [0, 2], 2, [0, 1, 4, 5, 6, 7, 10, 11, 12, 13, 16, 17]),
    (4, [1, 3], 1, [1, 3, 5, 7, 9, 11]),
    (12, [1], 4, [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]),
    (12, [0, 1, 2], 4, [*range(36)]),
    (5, [0], 5, [*range(15)]),
)
BLOCKS = (
    (TWO, TensorCut(
        8, 4, 6,
        ((0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19), (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23)),
        ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2), (3, 4, 5)),
    )),
    (PAIRS, TensorCut(  # a head is twice as wide
        8, 2, 8,
        ((0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19), (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23)),
        ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)),
    )),
    (THREE, TensorCut(
        6, 3, 6,
        ((0, 1, 6, 7, 12, 13), (2, 3, 8, 9, 14, 15), (4, 5, 10, 11, 16, 17)),
        ((0, 1), (2, 3), (4, 5)), ((0, 1), (2, 3), (4, 5)),
    )),
    (ONE, TensorCut(4, 2, 5, (tuple(range(12)),), ((0, 1, 2, 3),), ((0, 1, 2, 3, 4),))),
)  # fmt: skip


# --- what a rank does ---


@in_rank(join=False)
def columns(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield what attention_columns returns in each case."""
    for width, heads, head_dim in context.arguments["cases"]:
        own_heads = torch.tensor(heads)
        value = lesson.attention_columns(width, own_heads, head_dim)
        is_vector = copy_of(value) is not None and value.dim() == 1
        listed = value.tolist() if is_vector else dtype_of(value)
        yield {"columns": listed, "dtype": dtype_of(value), "heads": own_heads.tolist()}


def plain_block(arguments: Fields, weights: Mapping[str, Tensor]) -> Any:
    """Return a GPT2Block with these weights, in float64."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    rates = dict(zip(("attn_pdrop", "resid_pdrop"), arguments["dropout"], strict=True))
    width, heads, inner = arguments["sizes"]
    config = GPT2Config(n_embd=width, n_head=heads, n_inner=inner, n_positions=16, **rates)
    config._attn_implementation = "sdpa"  # it is causal without a mask, and a single block gets none
    block = GPT2Block(config, layer_idx=0).double()
    block.load_state_dict(weights)
    torch.manual_seed(1)  # for dropout: the same on all ranks, as after set_seed
    return block


def one_pass(context: Context, block: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Fields:
    """Return output and gradients of a forward and a backward pass."""
    block.zero_grad()
    x = inputs["x"].clone().requires_grad_()
    context.event("forward")
    output = block(x)
    y = output[0] if isinstance(output, tuple) else output  # some versions of transformers return a tuple
    context.event("backward")
    y.backward(inputs["upstream"])
    context.event("ended")
    values = {name: copy_of(parameter.grad) for name, parameter in block.named_parameters()}
    return values | {"y": copy_of(y), "x": copy_of(x.grad)}


@in_rank(uses=[plain_block, one_pass], preload=MODELS, join=False)
def whole_block(context: Context, _lesson: ModuleType, inputs: Fields) -> object:
    """Return what the block computes on one worker."""
    return one_pass(context, plain_block(context.arguments, inputs["weights"]), inputs)


@in_rank(uses=[plain_block, one_pass], preload=MODELS)
def cut_block(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return what shard_block leaves of a block, and what the cut block computes in two passes."""
    group = own_group(context)
    block = plain_block(context.arguments, inputs["weights"])
    before = torch.random.get_rng_state()
    context.event("shard_block")
    if group is None:
        lesson.shard_block(block)
    else:
        lesson.shard_block(block, group)
    report: Fields = {name: copy_of(value) for name, value in block.named_parameters()}
    report |= {"split_size": int(block.attn.split_size), "num_heads": int(block.attn.num_heads)}
    report["random"] = torch.equal(before, torch.random.get_rng_state())
    return report | {"passes": [one_pass(context, block, inputs) for _ in range(2)]}


# --- attention_columns ---


def check_columns(grade: Grade) -> None:
    """Check the cases in COLUMNS."""
    (values,) = run(grade, columns, [None], cases=[case[:3] for case in COLUMNS]).values
    for (width, heads, head_dim, right), got in zip(COLUMNS, values, strict=True):
        where = f"attention_columns({width}, tensor({heads}), {head_dim}): "
        if not isinstance(got["columns"], list) or "int" not in got["dtype"]:
            kind = "a tensor of whole numbers with one dimension"
            grade.fail(observed=f"{where}expected {kind}, got {got['dtype']}")
        by_head = np.reshape(right, (3, len(heads), head_dim)).transpose(1, 0, 2).ravel().tolist()
        queries = right[: len(right) // 3]
        wrong_thirds = [begin * len(queries) + column for begin in range(3) for column in queries]
        as_neighbours = [3 * head_dim * head + column for head in heads for column in range(3 * head_dim)]
        mistakes = {
            "only the queries are there: take the same heads from the second and the third third as well": queries,
            "the columns are right, but their order is not: all queries, then all keys, then all values": by_head,
            "the columns of these heads in each third: the thirds begin at 0, width and 2 width": wrong_thirds,
            "c_attn is cut as if q, k and v of one head were neighbours: it has all queries, then all keys, then all "
            "values": as_neighbours,
        }
        expected = {
            "heads": Expected(heads, "attention_columns changes `heads`, which belongs to the caller"),
            "columns": Expected(right, mistakes=mistakes),
        }
        check(grade, where, got, expected)


# --- a block ---


class BlockRun:
    """One run of a cut block, with what is right for each rank."""

    def __init__(self, grade: Grade, ranks: Ranks, cut: TensorCut, dropout: tuple[float, float] = NO_DROPOUT) -> None:
        self.grade, self.ranks, self.cut, self.dropout = grade, ranks, cut, dropout
        self.arguments: Fields = {"sizes": (cut.width, cut.heads, cut.inner), "dropout": dropout}
        self.of_group = {group: self._draw(group) for group in map(ranks.among, range(ranks.count))}
        self.inputs = [self._with_noise(rank, self.of_group[ranks.among(rank)]) for rank in range(ranks.count)]
        self.result = run(grade, cut_block, self.inputs, BLOCK_HINTS, groups=ranks.groups, **self.arguments)

    def whole(self, rank: int) -> Fields:
        """Return what the block computes on one worker, from the inputs of a rank's group."""
        own = self.of_group[self.ranks.among(rank)]
        return dict(run_alone(self.grade, whole_block, [own], **self.arguments)[0])

    def _draw(self, group: tuple[int, ...]) -> Fields:
        draw = drawn.generator(self.grade.seed, 44, self.ranks.count, *group)
        weights = {name: draw.normal(scale=0.7, size=shape) for name, shape in self.cut.shapes.items()}
        x, upstream = (draw.normal(size=(EXAMPLES, TOKENS, self.cut.width)) for _ in range(2))
        return {"weights": weights, "x": x, "upstream": upstream}

    def _with_noise(self, rank: int, inputs: Fields) -> Fields:
        """Return a group's inputs with noise in all slices but this rank's."""
        noise, weights = drawn.generator(self.grade.seed, 45, self.ranks.count, rank), dict(inputs["weights"])
        for name in SLICED:
            weights[name] = noise.normal(size=weights[name].shape)
            place = self.place(rank, name)
            weights[name][place] = inputs["weights"][name][place]
        return inputs | {"weights": weights}

    def indices(self, rank: int, name: str) -> list[int]:
        return self.cut.indices(name, self.ranks.among(rank).index(rank))

    def place(self, rank: int, name: str) -> Index:
        """Return an index that takes a rank's slice of a parameter, or of its gradient."""
        return self.cut.place(name, self.ranks.among(rank).index(rank))

    def where(self, rank: int) -> str:
        return f"a block of width {self.cut.width} with {self.cut.heads} heads, {self.ranks.words(rank)}"

    def check_kept(self) -> None:
        """Check that each rank has its columns and rows, whole heads, and the attributes that the attention reads.

        Cutting adds no parameter and draws no random number.
        """
        for rank, values in enumerate(self.result.values):
            weights = self.inputs[rank]["weights"]
            expected = {name: self._slice(rank, name, whole) for name, whole in weights.items()}
            split = len(self.indices(rank, "attn.c_proj.weight"))
            heads = split // (self.cut.width // self.cut.heads)  # each has width / heads columns
            why = f"this rank has {heads} of the heads, with {split} columns in each third of c_attn"
            for name, right in (("split_size", split), ("num_heads", heads)):
                expected[name] = Expected(right, f"attention.{name} is {{got}}, expected {{expected}}: {why}")
            random = "shard_block changes torch's random state: all ranks must draw the same numbers for dropout"
            expected["random"] = Expected(True, random)
            more = sorted(set(values) - {*weights, "split_size", "num_heads", "random", "passes"})
            got = values | {"more": more}
            expected["more"] = Expected([], "there is a new parameter {got}: replace the four matrices, nothing else")
            check(self.grade, f"{self.where(rank)}: ", got, expected)

    def _slice(self, rank: int, name: str, whole: np.ndarray) -> Expected:
        """Expect a rank's part of a parameter."""
        if name not in SLICED:
            return Expected(whole, "layer norms and the biases of both c_proj are whole on every rank", tolerance=EXACT)
        indices, axis, ranks = self.indices(rank, name), SLICED[name][0], len(self.ranks.among(rank))
        mistakes = {"{name} is still whole": whole}
        message = "c_proj gets what this rank's heads give, side by side: it needs the rows of these heads"
        if "c_attn" in name:
            message = "a head is cut, or belongs to another rank: take whole heads, those of own_part"
            piece = np.array_split(np.arange(whole.shape[axis]), ranks)[self.ranks.among(rank).index(rank)]
            words = "one piece of c_attn cuts through q, k and v: take the columns of whole heads from each third"
            mistakes[words] = np.take(whole, piece, axis)
        kind = "rows" if name.endswith("c_proj.weight") else "columns"
        named = f"{name} (this rank's {kind} {indices})"
        right = whole[self.place(rank, name)]
        return Expected(right, "" if "mlp" in name else message, named, mistakes, tolerance=EXACT)

    def check_passes(self) -> None:
        """Check that output and gradients are the whole block's, or slices of them."""
        dropout = "with dropout, the block computes something else than on one worker: leave its dropout layers and "
        dropout += "torch's random state as they are"
        check_groups(self.grade, self.result, self.ranks)
        called = {"y": "the output", "x": "the gradient of the input"}
        for rank, values in enumerate(self.result.values):
            n, expected = len(self.ranks.among(rank)), {}
            for name, whole in self.whole(rank).items():
                right = whole[self.place(rank, name)]
                mistakes = {
                    f"{{name}} is {n} times too large: summed over ranks although each has the whole of it": right * n,
                    f"{{name}} is 1/{n} of what is expected: divided, though nothing was summed": right / n,
                }
                expected[name] = Expected(
                    right, "" if self.dropout == NO_DROPOUT else dropout, called.get(name, f"the gradient of {name}"),
                    mistakes if self.dropout == NO_DROPOUT else {}, tolerance=Tolerance(slack=0.1),
                )  # fmt: skip
            for number, one in enumerate(values["passes"] if self.dropout == NO_DROPOUT else values["passes"][:1]):
                again = ", in a second pass" if number else ""
                check(self.grade, f"{self.where(rank)}{again}: ", one, expected, self.result)

    def check_agreement(self) -> None:
        """Check, with dropout everywhere, what two passes of the same input leave: gradients by name, y and x.

        What all ranks have must be equal on all of them. The two outputs y must differ, or dropout is off.
        """
        for rank, values in enumerate(self.result.values):
            first = self.ranks.among(rank)[0]
            where = f"{self.where(rank)}, with dropout: "
            message = f"the values differ from those of rank {first}: every rank has the whole of them, and dropout "
            message += "must drop the same elements on all ranks"
            for own, other in zip(values["passes"], self.result.values[first]["passes"], strict=True):
                shared_by_all = {name: value for name, value in other.items() if name not in SLICED}
                tolerance = Tolerance(slack=0.1)
                expected = {
                    name: Expected(value, message, tolerance=tolerance) for name, value in shared_by_all.items()
                }
                check(self.grade, where, own, expected)
            if np.allclose(values["passes"][0]["y"], values["passes"][1]["y"]):
                self.grade.fail(f"{where}dropout does nothing any more; the block is in training mode")

    def check_messages(self) -> None:
        """Check that each direction sums an activation of the attention and one of the MLP; cutting sends nothing."""
        advice = {"shard_block": "every rank has the model"}
        both = "one activation for the attention, and one for the MLP"
        for rank in range(self.ranks.count):
            group = self.ranks.among(rank)
            one = ExpectedCall("all_reduce", members=group, elements=EXAMPLES * TOKENS * self.cut.width)
            for event, calls in phases(self.result, rank):
                if event.name == "ended" or (len(group) == 1 and not calls):
                    continue
                expected = [] if event.name == "shard_block" else [one, one]
                where = f"{self.where(rank)}, {event.name}"
                check_calls(self.grade, where, rank, calls, expected, advice.get(event.name, both))


# --- the graded tests ---


@graded("b.12")
def test_attention_columns_are_those_of_whole_heads_in_each_third(grade: Grade) -> None:
    check_columns(grade)


@graded("b.12")
def test_each_rank_has_whole_heads_and_its_part_of_the_mlp(grade: Grade) -> None:
    for ranks, cut in BLOCKS:
        BlockRun(grade, ranks, cut).check_kept()


@graded("b.12")
def test_a_cut_block_computes_and_sends_what_it_must(grade: Grade) -> None:
    for ranks, cut in BLOCKS:
        block_run = BlockRun(grade, ranks, cut)
        block_run.check_passes()
        block_run.check_messages()
    for ranks, cut in BLOCKS[:2]:
        BlockRun(grade, ranks, cut, RESIDUAL).check_passes()
        BlockRun(grade, ranks, cut, BOTH).check_agreement()
