"""Judges shard_block on a real GPT2Block: which columns and rows a rank has, and what the block computes and sends.

Of the block, a rank is given its own slices right; in the others' places is noise, another one on every rank. What is
right is computed by transformers' own block, in a rank that loads no student's file.
"""

import numpy as np

from grader.checks import diagnosis, reference
from grader.checks.beyond.tensor_parallel.tensor_messages import check_calls, phases
from grader.checks.beyond.tensor_parallel.tensor_settings import PROBE, Cut
from grader.grading import Grade
from grader.in_rank import explained
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.tensor_shared import HINTS, Ranks

EXAMPLES, TOKENS = 2, 5
STILL, RESIDUAL, BOTH = (0.0, 0.0), (0.0, 0.5), (0.4, 0.5)  # dropout of the attention, and of the residual
SLICED = {  # the axis along which a parameter is cut, and the field of Cut that says where
    "attn.c_attn.weight": (1, "attention"), "attn.c_attn.bias": (0, "attention"),
    "attn.c_proj.weight": (0, "projection"), "mlp.c_fc.weight": (1, "hidden"), "mlp.c_fc.bias": (0, "hidden"),
    "mlp.c_proj.weight": (0, "hidden"),
}  # fmt: skip
LITERAL: tuple[tuple[int, list[int], int, list[int]], ...] = (  # width, heads, head_dim, columns
    (8, [1], 2, [2, 3, 10, 11, 18, 19]),
    (8, [2, 3], 2, [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]),
    (6, [0, 2], 2, [0, 1, 4, 5, 6, 7, 10, 11, 12, 13, 16, 17]),
    (4, [1, 3], 1, [1, 3, 5, 7, 9, 11]),
    (12, [1], 4, [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]),
    (12, [0, 1, 2], 4, [*range(36)]),
    (5, [0], 5, [*range(15)]),
)
CRASHES = HINTS | {
    "is out of bounds for dimension": "a layer has no such row or column: c_proj has as many rows as the model is wide",
    "not enough values to unpack": "the attention cuts q, k and v apart by attention.split_size: set it to the columns "
    "of this rank's heads",
    "too many values to unpack": "the attention cuts q, k and v apart by attention.split_size: set it to the columns "
    "of this rank's heads",
    "cannot be multiplied": "the columns of one layer and the rows of the next do not fit: both are of the same heads, "
    "or of the same hidden units",
}
Arrays = dict[str, np.ndarray]


def check_columns(grade: Grade) -> None:
    """attention_columns of cases whose answer is written down."""
    cases = [[width, heads, head_dim] for width, heads, head_dim, _ in LITERAL]
    (found,) = grade.values(f"{PROBE}:columns", 1, cases=cases)
    for (width, heads, head_dim, right), told in zip(LITERAL, found, strict=True):
        call = f"attention_columns({width}, tensor({heads}), {head_dim})"
        if told["value"] is None or "int" not in told["kind"] or np.ndim(told["value"]) != 1:
            got = told["kind"] if told["value"] is None else f"{told['kind']} {np.shape(told['value'])}"
            grade.fail(f"{call}: expected a tensor of whole numbers with one dimension, got {got}")
        if not told["intact"]:
            grade.fail(f"{call}: `heads` is changed; it is the caller's")
        got = told["value"].tolist()
        if got != right:
            grade.fail(f"{_name_columns(got, right, width)}{call}: expected {right}, got {short(got, 200)}")


def _name_columns(got: list[int], right: list[int], width: int) -> str:
    third = len(right) // 3
    if got == right[:third]:
        return "only the queries are there: take the same heads from the second and the third third as well\n"
    if sorted(got) == right:
        return "the columns are right, but their order is not: all queries, then all keys, then all values\n"
    if len(got) == len(right) and all(column < 3 * width for column in got):
        return "the columns of these heads in each third: the thirds begin at 0, width and 2 width\n"
    return ""


class BlockRun:
    """One run of a block, with what is right for each rank."""

    def __init__(
        self, grade: Grade, ranks: Ranks, cut: Cut, dropout: tuple[float, float] = STILL, examples: int = EXAMPLES
    ) -> None:
        self.grade, self.ranks, self.cut, self.dropout, self.examples = grade, ranks, cut, dropout, examples
        told: Fields = {"width": cut.width, "heads": cut.heads, "inner": cut.inner, "dropout": list(dropout)}
        told |= {"examples": examples}
        self.inputs = {group: self._inputs(group) for group in map(ranks.among, range(ranks.count))}
        self.right: dict[tuple[int, ...], Fields] = {}
        for group, mine in self.inputs.items():
            alone = told | {"group": [ranks.count, *group], "each": [mine]}
            self.right[group] = grade.session.run(f"{PROBE}:whole_block", 1, alone).values[0]
        self.given = [self._given(rank) for rank in range(ranks.count)]
        self.result: Result = grade.run(
            f"{PROBE}:block", ranks.count, payloads=True, each=self.given,
            groups=list(map(list, ranks.groups)), **told,
        )  # fmt: skip
        if verdict := grade.verdict(self.result):
            raise explained(verdict, CRASHES)

    def _inputs(self, group: tuple[int, ...]) -> Fields:
        draw = drawn.generator(self.grade.seed, 44, self.ranks.count, *group)
        width, inner = self.cut.width, self.cut.inner
        shapes: dict[str, tuple[int, ...]] = {
            "ln_1.weight": (width,), "ln_1.bias": (width,), "attn.c_attn.weight": (width, 3 * width),
            "attn.c_attn.bias": (3 * width,), "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,), "mlp.c_fc.weight": (width, inner),
            "mlp.c_fc.bias": (inner,), "mlp.c_proj.weight": (inner, width), "mlp.c_proj.bias": (width,),
        }  # fmt: skip
        weights = {name: draw.normal(scale=0.7, size=shape) for name, shape in shapes.items()}
        x, upstream = (draw.normal(size=(self.examples, TOKENS, width)) for _ in range(2))
        return {"weights": weights, "x": x, "upstream": upstream}

    def _given(self, rank: int) -> Fields:
        """The inputs of a rank's group, with noise in the places of all slices but its own."""
        mine = self.inputs[self.ranks.among(rank)]
        noise, weights = drawn.generator(self.grade.seed, 45, self.ranks.count, rank), dict[str, np.ndarray]()
        for name, value in mine["weights"].items():
            weights[name] = value
            if name in SLICED:
                weights[name] = noise.normal(size=value.shape)
                weights[name][self._place(rank, name)] = value[self._place(rank, name)]
        return mine | {"weights": weights}

    def _place(self, rank: int, name: str) -> tuple:
        """An index that takes a rank's slice of a parameter."""
        axis, indices = SLICED[name][0], self._indices(rank, name)
        return (slice(None), indices) if axis else (indices,)

    def _indices(self, rank: int, name: str) -> list[int]:
        return list(getattr(self.cut, SLICED[name][1])[self.ranks.among(rank).index(rank)])

    def own(self, rank: int, name: str, whole: np.ndarray) -> np.ndarray:
        """What a rank has of a whole parameter, or of its gradient."""
        return whole[self._place(rank, name)] if name in SLICED else whole

    def where(self, rank: int) -> str:
        return f"a block of width {self.cut.width} with {self.cut.heads} heads, {self.ranks.words(rank)}"

    # --- judging ---

    def check_slices(self) -> None:
        """The right columns and rows, whole heads, and the attributes that the attention reads."""
        for rank, value in enumerate(self.result.values):
            where = self.where(rank)
            for name in self.right[self.ranks.among(rank)]["gradients"]:
                got = value["parameters"].get(name)
                given = self.given[rank]["weights"][name]
                right = self.own(rank, name, given)
                if got is None:
                    self.grade.fail(f"{where}: there is no {name} any more: replace the four matrices, nothing else")
                if not (np.shape(got) == right.shape and np.array_equal(got, right)):
                    self.grade.fail(f"{where}: {self._name_slice(rank, name, got, given)}")
            if more := sorted(set(value["parameters"]) - set(self.right[self.ranks.among(rank)]["gradients"])):
                self.grade.fail(f"{where}: there is a new parameter {more[0]}: replace the four matrices, nothing else")
            columns = len(self._indices(rank, "attn.c_proj.weight"))
            heads = self.cut.heads * columns // self.cut.width
            for attribute, found, wanted in (
                ("split_size", value["split"], columns),
                ("num_heads", value["heads"], heads),
            ):
                if found != wanted:
                    self.grade.fail(
                        f"{where}: attention.{attribute} is {found}, expected {wanted}: this rank has {heads} of the "
                        f"heads, with {columns} columns in each third of c_attn"
                    )
            if value["random"]:
                self.grade.fail(
                    f"{where}: shard_block changes torch's random state: where dropout acts on what all ranks have, "
                    "all must draw the same numbers"
                )

    def _name_slice(self, rank: int, name: str, got: np.ndarray, given: np.ndarray) -> str:
        """Which columns or rows a rank has, and which mistake has taken them."""
        if name not in SLICED:
            return f"{name} is not as it was: layer norms and the biases of both c_proj are whole on every rank"
        axis, right = SLICED[name][0], self._indices(rank, name)
        kind = "columns" if axis or name.endswith("bias") else "rows"
        if np.ndim(got) != given.ndim or np.shape(got)[1 - axis : 2 - axis] != given.shape[1 - axis : 2 - axis]:
            return f"{name}: expected {len(right)} {kind} of {given.shape}, got the shape {np.shape(got)}"
        lines = np.moveaxis(given, axis, 0).tolist()
        taken = [lines.index(line) if line in lines else None for line in np.moveaxis(got, axis, 0).tolist()]
        words = f"{name}: expected the {kind} {right}, got {short(taken, 200)}"
        return f"{self._cause(rank, name, taken, right, len(lines))}{words}"

    def _cause(self, rank: int, name: str, taken: list[int | None], right: list[int], count: int) -> str:
        group = self.ranks.among(rank)
        n, member = len(group), group.index(rank)
        if taken == list(range(count)) and n > 1:
            return "it is still whole; "
        begin = sum(len(part) for part in np.array_split(np.arange(count), n)[:member])
        if "c_attn" in name and n > 1 and taken == list(range(begin, begin + len(taken))):
            return "one piece of c_attn cuts through q, k and v: take the columns of whole heads from each third; "
        if sorted(map(str, taken)) == sorted(map(str, right)):
            return "their order is wrong: all queries of this rank, then its keys, then its values; "
        if "c_attn" in name and n > 1 and len(set(taken) & set(right)) < len(right):
            return "heads are cut, or they are those of another rank: each rank has whole heads, own_part of them; "
        if name == "attn.c_proj.weight":
            return "c_proj gets what this rank's heads give, side by side: it needs the rows of these heads; "
        return ""

    def check_passes(self) -> None:
        """Forward, input gradient and parameter gradients are the whole block's, or slices of them."""
        for rank, value in enumerate(self.result.values):
            right = self.right[self.ranks.among(rank)]
            expected = {"y": right["y"], "x": right["x"]}
            expected |= {name: self.own(rank, name, gradient) for name, gradient in right["gradients"].items()}
            passes = value["passes"] if self.dropout == STILL else value["passes"][:1]
            for number, one in enumerate(passes):
                found = {"y": one["y"], "x": one["x"], **one["gradients"]}
                for name, whole in expected.items():
                    if reference.close(found.get(name), whole, 0.0, 0.1):
                        continue
                    called = {"y": "the output", "x": "the gradient of the input"}.get(name, f"the gradient of {name}")
                    words = diagnosis.parameter_words(called, found.get(name), whole)
                    again = ", in a second pass" if number else ""
                    self.grade.fail(
                        f"{self._name(rank, name, found.get(name), whole)}{self.where(rank)}{again}: {words}"
                    )

    def _name(self, rank: int, name: str, got: np.ndarray | None, right: np.ndarray) -> str:
        n = len(self.ranks.among(rank))
        if self.dropout != STILL:
            return "with dropout, it is not what one worker computes: dropout acts as it does there, where it did\n"
        if got is not None and np.shape(got) == right.shape and n > 1:
            if diagnosis.same(got, right * n):
                return f"it is {n} times too large: summed over ranks that all have the whole of it\n"
            if diagnosis.same(got, right / n):
                return f"it is 1/{n} of it: divided, though nothing was summed\n"
        return ""

    def check_agreement(self) -> None:
        """With dropout everywhere: what all ranks have is the same on all of them, and dropout is on."""
        for rank, value in enumerate(self.result.values):
            group = self.ranks.among(rank)
            first, right = self.result.values[group[0]], self.right[group]
            for one, other in zip(value["passes"], first["passes"], strict=True):
                mine, theirs = ({"the output": p["y"], "the input's gradient": p["x"]} for p in (one, other))
                for name in right["gradients"]:
                    if name not in SLICED:
                        mine[f"the gradient of {name}"] = one["gradients"][name]
                        theirs[f"the gradient of {name}"] = other["gradients"][name]
                for name, found in mine.items():
                    if not reference.close(found, theirs[name], 0.0, 0.1):
                        self.grade.fail(
                            f"{self.where(rank)}, with dropout: {name} is not the same as on rank {group[0]}: what all "
                            "ranks have must stay equal, and so must the dropout that acts on it"
                        )
            if np.allclose(value["passes"][0]["y"], value["passes"][1]["y"]):
                self.grade.fail(f"{self.where(rank)}: dropout does nothing any more; the block is in training mode")

    def check_messages(self) -> None:
        """An activation for the attention and one for the MLP, in each direction; nothing while the block is cut."""
        size = self.examples * TOKENS * self.cut.width
        for rank in self.result.ranks:
            for phase, calls in phases(rank):
                group = self.ranks.among(rank.rank)
                sizes = [] if phase[0].startswith("make") else [size, size]
                name = "shard_block" if not sizes else phase[0]
                advice = (
                    "one activation for the attention, and one for the MLP" if sizes else "every rank has the model"
                )
                check_calls(self.grade, calls, sizes, group, f"{self.where(rank.rank)}, {name}", advice)
