"""Copies of the tiny models, to be damaged or served by a test."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from common.models.load import model_path


def copy_of_tiny(kind: str, folder: Path, *names: str) -> Path:
    """A new folder with these files of the tiny model, or with all of them."""
    folder.mkdir()
    source = Path(model_path("tiny", kind))
    for name in names or [file.name for file in source.iterdir()]:
        shutil.copy(source / name, folder)
    return folder


def in_shards(folder: Path) -> Path:
    """The same model with its weights in two files, as large models come."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"model-0000{1 + (i > len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in weights.items() if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
