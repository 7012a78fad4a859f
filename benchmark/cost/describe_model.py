"""Look up a model's architecture, by its name or its folder; what was found once is kept."""

import json
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

from benchmark.cost.architecture import Architecture, Weight
from benchmark.names import MODELS, sized_gpt2
from common.cache import read_cached
from common.paths import cache_dir

FORMAT = 2  # of the cached files


@cache
def describe(model: str, length: int) -> Architecture:
    """Return the architecture of a model by its name or folder; examples have `length` tokens.

    What was found once is kept: then a prediction needs neither torch nor the model.
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
    found = json.loads((folder / "architecture.json").read_text())
    weights = tuple(Weight(entry["name"], tuple(entry["shape"]), entry["block"]) for entry in found["weights"])
    return Architecture(**found | {"weights": weights})
