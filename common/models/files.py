"""Checks the files of a model's folder before any worker joins, and says which file to copy again."""

import json
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common.errors import InputError, reading

MODEL_FLAG = "--model_name_or_path"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def check_kind(folder: Path, kind: str) -> None:
    """Raise InputError unless config.json says that the folder holds a model of this kind."""
    found = read_json(folder / "config.json", MODEL_FLAG).get("model_type")
    if found != kind:
        raise InputError(f"{MODEL_FLAG}: expected a model of type {kind}, {folder} holds {found}; name another model")


def weights_of(folder: Path) -> Path | None:
    """Return the file with the weights, or the index of several such files; None if there is none."""
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def check_weights(folder: Path, copy: str) -> None:
    """Raise InputError if a file with weights is missing or incomplete; `copy` says how to get it again."""
    weights = weights_of(folder)
    if weights is None:
        raise InputError(f"{MODEL_FLAG}: {folder} is not a model: it has no model.safetensors; copy the whole folder")
    for path in [weights] if weights.suffix != ".json" else shards_of(weights):
        reason = _damage(path)
        if reason:
            raise InputError(f"{MODEL_FLAG}: {path} is damaged ({reason}); {copy}")
    if (folder / "generation_config.json").exists():
        read_json(folder / "generation_config.json", MODEL_FLAG)


def shards_of(index: Path) -> list[Path]:
    """Return the files that an index lists."""
    files = read_json(index, MODEL_FLAG).get("weight_map")
    if not isinstance(files, dict):
        raise InputError(f"{MODEL_FLAG}: {index}: expected a weight_map with the names of files; copy it again")
    return [index.with_name(str(name)) for name in sorted(set(files.values()))]


def _damage(path: Path) -> str | None:
    """Return what is wrong with one file, in a few words. Only both ends are read: they show an incomplete copy."""
    if not path.is_file():
        return "it is missing"
    with reading(path, "copy it again"), open(path, "rb") as file:
        start = file.read(2)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt"):  # opening compares the header with the file's size
                return None
        except SafetensorError as error:
            return str(error)
    if start == b"PK":  # torch.save writes a zip archive, whose directory is at its end
        return None if zipfile.is_zipfile(path) else "it was cut off"
    return None if start[:1] == b"\x80" else "it holds no weights"  # a pickle, as torch wrote them before 1.6


def read_json(path: Path, flag: str, default: dict | None = None) -> dict:
    """Return the object in a JSON file, or `default` if the file does not exist and a default is set."""
    if default is not None and not path.exists():
        return default
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{flag}: {path} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{flag}: {path}: expected a JSON object; copy it again")
    return content
