"""What a model consists of, as far as cost depends on it: parameters, blocks, arithmetic and activations.

`describe` looks a model up by its name or its folder, and keeps what was found once.
"""

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from benchmark.names import MODELS, sized_gpt2
from common.cache import read_cached
from common.paths import cache_dir

BYTES = 4  # of an element: the predictions are for fp32
FORMAT = 2  # of the cached files


@dataclass(frozen=True)
class Weight:
    """A parameter. block: the index of the block that it belongs to, or None: outside of all blocks, or shared."""

    name: str
    shape: tuple[int, ...]
    block: int | None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return BYTES * self.elements


@dataclass(frozen=True)
class Architecture:
    """A model at a length of examples.

    weights: in the model's order, each once. units: the parts of forward in order, "before", "block 0", ..., "after".
    flops: of one example in the forward of a unit. activations: bytes that one example keeps for backward.
    """

    model: str
    kind: str
    length: int
    width: int
    n_heads: int
    n_blocks: int
    weights: tuple[Weight, ...]
    flops: dict[str, float]
    activations: float
    logits: float  # bytes of one example's logits

    @property
    def elements(self) -> int:
        return sum(weight.elements for weight in self.weights)

    @property
    def bytes(self) -> int:
        return BYTES * self.elements

    def of_block(self, block: int | None) -> list[Weight]:
        """Return the weights of a block; None: those of the root."""
        return [weight for weight in self.weights if weight.block == block]


@cache
def describe(model: str, length: int) -> Architecture:
    """Return the architecture of a model by its name or folder; examples have `length` tokens.

    The result is kept in a cache: then a prediction needs neither torch nor the model.
    """

    def inspect() -> Architecture:
        from benchmark.cost.inspect_model import inspect  # here: it loads torch, which takes seconds

        return inspect(model, length)

    def build(folder: Path) -> None:
        (folder / "architecture.json").write_text(json.dumps(asdict(inspect())))

    if model not in MODELS and sized_gpt2(model) is None:
        return inspect()  # a folder may change
    name = f"{model}-{length}-{version('transformers')}-{version('torch')}-v{FORMAT}"
    return read_cached(cache_dir("architectures") / name, build, _read)


def _read(folder: Path) -> Architecture:
    fields = json.loads((folder / "architecture.json").read_text())
    weights = tuple(Weight(entry["name"], tuple(entry["shape"]), entry["block"]) for entry in fields["weights"])
    return Architecture(**fields | {"weights": weights})
