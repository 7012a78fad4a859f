"""What is sent in a step, by dtype: an engine that rounds gradients on their way is within every numeric limit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.workers.collectives import Collective

DTYPES = {"Float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16, "Double": torch.float64}
SMALL = 1000  # elements of a message; norms and flags have any dtype


@dataclass(frozen=True)
class SentMessage:
    """A collective of this worker. elements: of its input. carries: gradients or parameters."""

    name: str
    dtype: torch.dtype
    elements: int

    @property
    def carries(self) -> str:
        return "gradients" if any(word in self.name for word in ("reduce", "all_to_all", "alltoall")) else "parameters"

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


def messages(collectives: Sequence[Collective] | None) -> list[SentMessage] | None:
    """Return what these send in floating point; None where it is not known."""
    if collectives is None:
        return None
    return [
        SentMessage(one.name, DTYPES[dtype], math.prod(shape))
        for one in collectives
        for shape, dtype in zip(one.shapes, one.dtypes, strict=False)
        if dtype in DTYPES
    ]


def faults(sent: Sequence[SentMessage], promised: tuple[torch.dtype, torch.dtype], elements: int) -> list[str]:
    """What is sent in another dtype than promised (of gradients, of parameters), or not at all.

    elements: how many a step has to send at least. Gradients may be gathered, so gathered parameters count, too: that a
    part is missing then, the numbers show.
    """
    texts = []
    expected = dict(zip(("gradients", "parameters"), promised, strict=True))
    for message in sent:
        if message.elements > SMALL and message.dtype != expected[message.carries]:
            text = f"{message.name} sends {word(message.dtype)}, expected {word(expected[message.carries])}"
            if text not in texts:
                texts.append(text)
    count = sum(message.elements for message in sent)
    if count < elements:
        texts.append(f"sends {count} elements in a step, fewer than the {elements} gradients")
    return texts


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def by_kind(sent: Sequence[SentMessage]) -> dict[str, int]:
    """Bytes of a step's inputs, by collective and dtype."""
    sizes: dict[str, int] = {}
    for message in sent:
        key = f"{message.name} {word(message.dtype)}"
        sizes[key] = sizes.get(key, 0) + message.bytes
    return sizes
