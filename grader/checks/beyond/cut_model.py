"""GPT-2 cut into stages and slices: what a rank is given, and what it must come to. Tables are literal."""

from dataclasses import dataclass, field

import numpy as np

from grader.grading import Grade
from grader.wire import drawn
from grader.wire.values import Fields

SIZES = {"width": 8, "heads": 2, "inner": 6, "vocabulary": 11, "positions": 6}
TOKENS = 5
SLICES = {  # for two ranks: which columns of a block's c_attn, rows of its c_proj, hidden units of its MLP each has
    "attention": ((0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19), (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23)),
    "projection": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "hidden": ((0, 1, 2), (3, 4, 5)),
}
SLICED = {  # the end of a parameter's name: the axis that is cut, and by which table
    "attn.c_attn.weight": (1, "attention"), "attn.c_attn.bias": (0, "attention"),
    "attn.c_proj.weight": (0, "projection"), "mlp.c_fc.weight": (1, "hidden"), "mlp.c_fc.bias": (0, "hidden"),
    "mlp.c_proj.weight": (0, "hidden"),
}  # fmt: skip
Arrays = dict[str, np.ndarray]
Training = Fields


@dataclass(frozen=True)
class Part:
    """What one rank has of the model: a stage, and a slice of each block's matrices (None: all of them)."""

    stage: int
    stages: int
    slice: int | None = None

    @property
    def blocks(self) -> list[int]:
        """A model has as many blocks as stages; on one stage, two."""
        return [self.stage] if self.stages > 1 else [0, 1]

    def whole_name(self, name: str) -> str:
        """The name in the whole model of a parameter of this stage."""
        if name.startswith("blocks."):
            number, _, rest = name.removeprefix("blocks.").partition(".")
            return f"transformer.h.{self.blocks[int(number)]}.{rest}"
        return "transformer.wte.weight" if name == "head.weight" else f"transformer.{name}"

    def names(self, of: Arrays) -> list[str]:
        """The parameters of the whole model that this stage has."""
        found = [name for name in of if any(name.startswith(f"transformer.h.{i}.") for i in self.blocks)]
        first, last = self.stage == 0, self.stage == self.stages - 1
        return found + [
            name for name in of
            if (first and ".wpe." in name) or (last and ".ln_f." in name) or ((first or last) and ".wte." in name)
        ]  # fmt: skip

    def place(self, name: str) -> tuple:
        """An index that takes this rank's slice of a parameter of the whole model."""
        end = next((end for end in SLICED if name.endswith(end)), "")
        if self.slice is None or not end:
            return ()
        axis, table = SLICED[end]
        indices = list(SLICES[table][self.slice])
        return (slice(None), indices) if axis else (indices,)

    def given(self, weights: Arrays, noise: np.random.Generator) -> Arrays:
        """The weights with noise in all places but this rank's own."""
        found, own = {}, self.names(weights)
        for name, value in weights.items():
            found[name] = noise.normal(scale=0.5, size=value.shape).astype(np.float32)
            if name in own:
                found[name][self.place(name)] = value[self.place(name)]
        return found


@dataclass
class Model:
    """One model, its tokens, and what one worker computes with them."""

    grade: Grade
    blocks: int
    batch: int
    steps: int
    options: Fields = field(default_factory=lambda: {"rate": 0.5, "momentum": 0.9})
    limits: list[float] = field(default_factory=list)  # of clipping, for each step; empty: none

    def __post_init__(self) -> None:
        self.limits = self.limits or [1e9] * self.steps
        draw = drawn.generator(self.grade.seed, 51, self.blocks, self.batch)
        width, inner = SIZES["width"], SIZES["inner"]
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (SIZES["vocabulary"], width),
            "transformer.wpe.weight": (SIZES["positions"], width),
        }
        for number in range(self.blocks):
            shapes |= {
                f"transformer.h.{number}.{name}": shape
                for name, shape in {
                    "ln_1.weight": (width,), "ln_1.bias": (width,), "attn.c_attn.weight": (width, 3 * width),
                    "attn.c_attn.bias": (3 * width,), "attn.c_proj.weight": (width, width),
                    "attn.c_proj.bias": (width,), "ln_2.weight": (width,), "ln_2.bias": (width,),
                    "mlp.c_fc.weight": (width, inner), "mlp.c_fc.bias": (inner,),
                    "mlp.c_proj.weight": (inner, width), "mlp.c_proj.bias": (width,),
                }.items()
            }  # fmt: skip
        shapes |= {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}
        self.weights = {name: draw.normal(scale=0.5, size=s).astype(np.float32) for name, s in shapes.items()}
        self.tokens = [draw.integers(0, SIZES["vocabulary"], (self.batch, TOKENS)) for _ in range(self.steps)]
        told = self.told() | self.options | {"limits": self.limits}
        mine = {"weights": self.weights, "tokens": self.tokens}
        arguments = told | {"batch": self.batch, "steps": self.steps, "each": [mine]}
        probe = "grader.probes.beyond.stages:whole_training"
        self.right: Training = self.grade.session.run(probe, 1, arguments).values[0]

    def told(self) -> Fields:
        """The arguments that describe the model to a probe."""
        return {"blocks": self.blocks, **SIZES}

    def mine(self, part: Part, rank: int, rows: slice = slice(None)) -> Fields:
        """What one rank is given: its part of the weights, and its rows of every batch."""
        noise = drawn.generator(self.grade.seed, 52, self.blocks, rank)
        return {"weights": part.given(self.weights, noise), "tokens": [tokens[rows].copy() for tokens in self.tokens]}

    def expected(self, part: Part, arrays: Arrays, name: str) -> np.ndarray | None:
        """Of the whole model's arrays, what a part must have under its own name; None: it has no such parameter."""
        whole = part.whole_name(name)
        return arrays[whole][part.place(whole)] if whole in part.names(arrays) else None
