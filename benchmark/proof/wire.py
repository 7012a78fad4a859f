"""What is sent in a step, by dtype: an engine that rounds gradients on their way is within every numeric limit."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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


def newest() -> int:
    """The number of the last recorded collective."""
    return max((entry["record_id"] for entry in entries()), default=-1)


def messages(after: int) -> list[SentMessage] | None:
    """The floating-point collectives after this number; None where torch has no recorder, or has forgotten some."""
    recorded, found = entries(), []
    if not recorded or recorded[0]["record_id"] > after + 1:
        return None
    for entry in recorded:
        if entry["record_id"] > after:
            name = entry["profiling_name"].split(":")[-1].split(" ")[0]
            for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
                kind = DTYPES.get(dtype.removeprefix("torch."))
                if kind is not None:
                    found.append(SentMessage(name, kind, math.prod(shape)))
    return found


def entries() -> list[dict[str, Any]]:
    """The flight recorder as common/workers/collectives.py reads it, with dtypes."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

        recorded: list[dict[str, Any]] = pickle.loads(_dump_fr_trace(includeStackTraces=False))["entries"]
    except (ImportError, RuntimeError, KeyError, TypeError):
        return []
    return recorded


def faults(sent: Sequence[SentMessage], promised: tuple[torch.dtype, torch.dtype], elements: int) -> list[str]:
    """What is sent in another dtype than promised (of gradients, of parameters), or not at all.

    elements: how many gradients a step has to send at least.
    """
    found = []
    wanted = dict(zip(("gradients", "parameters"), promised, strict=True))
    for message in sent:
        if message.elements > SMALL and message.dtype != wanted[message.carries]:
            text = f"{message.name} sends {word(message.dtype)}, expected {word(wanted[message.carries])}"
            if text not in found:
                found.append(text)
    count = sum(message.elements for message in sent if message.carries == "gradients")
    if count < elements:
        found.append(f"sends gradients of {count} elements, expected {elements}")
    return found


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def by_kind(sent: Sequence[SentMessage]) -> dict[str, int]:
    """Bytes of a step's inputs, by collective and dtype."""
    found: dict[str, int] = {}
    for message in sent:
        key = f"{message.name} {word(message.dtype)}"
        found[key] = found.get(key, 0) + message.bytes
    return found
