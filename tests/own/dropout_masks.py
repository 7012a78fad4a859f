"""Runs a task script and writes which dropout masks its rank drew: FOLDER/masks_{rank}.json, in the order of the calls.

    python tests/own/dropout_masks.py SCRIPT FOLDER FLAGS...

A mask of nn.Dropout is read from its output. Attention drops weights inside one operator: there the state of the
generator stands for the mask. It is the same exactly if the masks are.
"""

import hashlib
import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it starts as a script

import torch
from torch import Tensor, nn
from torch.nn import functional


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.to(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def watch() -> dict[str, list[str]]:
    """Collect masks from now on: "activations" from nn.Dropout, "attention" from the operator."""
    drawn: dict[str, list[str]] = {"activations": [], "attention": []}
    forward, attend = nn.Dropout.forward, functional.scaled_dot_product_attention

    def watched_forward(self: nn.Dropout, x: Tensor) -> Tensor:
        y = forward(self, x)
        if self.training and self.p > 0:
            drawn["activations"].append(digest(y == 0))
        return y

    def watched_attend(*arguments: Tensor, dropout_p: float = 0.0, **keywords: object) -> Tensor:
        if dropout_p > 0:
            drawn["attention"].append(digest(torch.get_rng_state()))
        return attend(*arguments, dropout_p=dropout_p, **keywords)

    nn.Dropout.forward = watched_forward  # type: ignore[method-assign]
    functional.scaled_dot_product_attention = watched_attend
    return drawn


def main() -> None:
    script, folder, *flags = sys.argv[1:]
    sys.argv = [script, *flags]
    drawn = watch()
    runpy.run_path(script, run_name="__main__")
    rank = flags[flags.index("--local_rank") + 1]
    (Path(folder) / f"masks_{rank}.json").write_text(json.dumps(drawn))


if __name__ == "__main__":
    main()
