"""What a model consists of, as far as cost depends on it: parameters, blocks, arithmetic and activations."""

import math
from dataclasses import dataclass

BYTES = 4  # of an element: the predictions are for fp32


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

    @property
    def units(self) -> list[str]:
        return list(self.flops)

    def of_block(self, block: int | None) -> list[Weight]:
        """Return the weights of a block; None: those of the root."""
        return [weight for weight in self.weights if weight.block == block]
