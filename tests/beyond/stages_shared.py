"""Shared by 1F1B and the grid: GPT-2 of which each rank has a stage and slices, and what one worker computes with it.

A rank's own parameters are correct; all others are noise that differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

import numpy as np

from grader.arithmetic import Tolerance
from grader.compare import Expected
from grader.grading import Grade
from grader.in_rank import in_rank, run_alone
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.tensor_shared import Index, TensorCut

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, torch
    from tests.beyond.stages_in_rank import gradients, small_gpt2

IN_RANK = "tests/beyond/stages_in_rank.py"
MODELS = ("scripts", "steps", "models")
VOCABULARY, POSITIONS, TOKENS = 11, 6, 5
CUT = TensorCut(
    8, 2, 6,
    ((0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19), (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23)),
    ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2), (3, 4, 5)),
)  # fmt: skip
ROUNDING = Tolerance(total=0.1, slack=20.0)  # float32 against float64, through several layers
Arrays = dict[str, np.ndarray]


@in_rank(uses=[IN_RANK], preload=MODELS, join=False)
def on_one_worker(context: Context, _lesson: ModuleType, inputs: Fields) -> object:
    """Return loss, gradients and norm of each step in float64, and the parameters at the end."""
    a = context.arguments
    model = small_gpt2(a["sizes"], inputs["weights"]).double()
    sgd = torch.optim.SGD(model.parameters(), lr=a["rate"], momentum=a["momentum"])
    steps = []
    for tokens, limit in zip(inputs["tokens"], a["limits"], strict=True):
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        torch.autograd.backward(loss)
        steps.append({"loss": copy_of(loss), "gradients": gradients(model)})
        steps[-1]["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        sgd.step()
    return {"steps": steps, "parameters": {name: copy_of(value) for name, value in model.named_parameters()}}


class StagePart(NamedTuple):
    """One rank's part of the model: a stage, and a slice of each block's matrices (member None: whole matrices)."""

    stage: int
    stages: int
    member: int | None = None

    def has(self, name: str) -> bool:
        """Return whether a parameter of the model belongs to this stage. With several stages, each has one block."""
        is_first, is_last = self.stage == 0, self.stage == self.stages - 1
        if ".h." in name:
            return self.stages == 1 or f".h.{self.stage}." in name
        return {"wte": is_first or is_last, "wpe": is_first, "ln_f": is_last}[name.split(".")[1]]

    def place(self, name: str) -> Index:
        """Return an index that takes this rank's slice of a parameter."""
        in_block = ".".join(name.split(".")[3:])
        return (...,) if self.member is None else CUT.place(in_block, self.member)


class Model:
    """One model, its tokens, and what one worker computes with them."""

    def __init__(
        self, grade: Grade, blocks: int, batch: int, limits: Sequence[float], rate: float = 0.0, momentum: float = 0.0
    ) -> None:
        """Draw the model; `limits`: the clipping limit of each step."""
        self.grade, self.blocks = grade, blocks
        draw = drawn.generator(grade.seed, 51, blocks, batch)
        width = CUT.width
        shapes = {f"transformer.h.{i}.{name}": shape for i in range(blocks) for name, shape in CUT.shapes.items()} | {
            "transformer.wte.weight": (VOCABULARY, width), "transformer.wpe.weight": (POSITIONS, width),
            "transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,),
        }  # fmt: skip
        self.weights = {name: draw.normal(scale=0.5, size=shape).astype(np.float32) for name, shape in shapes.items()}
        self.tokens = [draw.integers(0, VOCABULARY, (batch, TOKENS)) for _ in limits]
        sizes = {"n_layer": blocks, "n_embd": width, "n_head": CUT.heads, "n_inner": CUT.inner}
        self.arguments: Fields = {
            "sizes": sizes | {"vocab_size": VOCABULARY, "n_positions": POSITIONS},
            "limits": list(limits), "rate": rate, "momentum": momentum,
        }  # fmt: skip
        whole = {"weights": self.weights, "tokens": self.tokens}
        (self.right,) = run_alone(grade, on_one_worker, [whole], **self.arguments)

    def inputs(self, part: StagePart, rank: int, rows: slice = slice(None)) -> Fields:
        """Return the inputs of one rank: its part of the weights, and its rows of every batch."""
        noise, weights = drawn.generator(self.grade.seed, 52, self.blocks, rank), dict[str, np.ndarray]()
        for name, value in self.weights.items():
            weights[name] = noise.normal(scale=0.5, size=value.shape).astype(np.float32)
            if part.has(name):
                weights[name][part.place(name)] = value[part.place(name)]
        return {"weights": weights, "tokens": [tokens[rows].copy() for tokens in self.tokens]}

    def expected(self, part: StagePart, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
        """Expect a rank's part of the whole model's gradients or parameters."""
        return {
            name: Expected(array[part.place(name)], tolerance=ROUNDING)
            for name, array in arrays.items() if part.has(name)
        }  # fmt: skip


def number(what: str, value: SupportsFloat) -> dict[str, Expected]:
    """Expect the loss or the norm of one worker."""
    limit = 1e-4 * abs(float(value))
    return {what: Expected(np.asarray(value), f"{what} is not that of one worker", tolerance=Tolerance(limit=limit))}
