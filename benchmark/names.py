"""The names of strategies and models. Apart from what they name, so that a sweep checks its flags without torch."""

import re
from pathlib import Path

from common.errors import InputError

STRATEGIES = (
    "single",
    "dp",
    "ddp",
    "fsdp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero1_offload",
    "zero2_offload",
    "zero3_offload",
    "pipeline",
    "tensor",
    "own_ring",
    "own_overlap",
    "own_zero1",
    "own_zero2",
    "own_zero3",
    "own_tensor",
    "own_1f1b",
    "own_grid",
)
MODELS = ("gpt2", "gpt2-tiny", "gpt2-24m", "t5-tiny", "t5-small", "t5-large", "t5-3b", "t5-11b")


def sized_gpt2(name: str) -> tuple[int, int] | None:
    """Blocks and width of a model such as gpt2-12x512; None for other names. A head has 64 numbers."""
    match = re.fullmatch(r"gpt2-([1-9]\d*)x([1-9]\d*)", name)
    return (int(match[1]), int(match[2])) if match and int(match[2]) % 64 == 0 else None


def check_model(flag: str, name: str) -> None:
    """Raises InputError unless there is such a model: a name, the size of a GPT-2, or a folder."""
    if name not in MODELS and sized_gpt2(name) is None and not (Path(name) / "config.json").is_file():
        raise InputError(
            f"{flag}: expected {', '.join(MODELS)}, gpt2-BLOCKSxWIDTH with a width divisible by 64, or a model's "
            f"folder; got {name!r}"
        )
