"""BERT, GPT-2 and T5 by hub name, from a folder, or `tiny`: a small model of each kind, made without a download.

    model_path("tiny", "bert")  -> a folder with config.json, model.safetensors and a tokenizer, as a hub model has them
    model_path("bert-base-cased", "bert"), model_path("/a/folder", "gpt2")  -> where from_pretrained finds the model

Names and files are checked here, before any rank joins a process group. Later, one rank's error would make the others
hang.
"""

import contextlib
import functools
import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from common.errors import InputError
from common.models.tiny import tiny_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


KINDS = ("bert", "gpt2", "llama", "t5")
MODEL_FLAG, TOKENIZER_FLAG = "--model_name_or_path", "--tokenizer_name"
# What is fetched from the hub: small files, and weights in one or several files, in today's format or the one before.
SMALL_FILES = ("*.json", "*.txt", "*.model")
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
# A tokenizer is one complete file, or a vocabulary of its kind, which may be the only file in a folder.
VOCABULARIES = {"bert": ("vocab.txt",), "gpt2": ("vocab.json", "merges.txt"), "t5": ("spiece.model",)}
# Names, because each class is loaded only when it is used.
READERS = {"bert": "BertTokenizer", "gpt2": "GPT2Tokenizer", "t5": "AutoTokenizer"}


def quiet_transformers() -> None:
    """Turn off progress bars and the table of newly initialised weights; in fine-tuning, the head is always new."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()


def model_path(name: str, kind: str, weights: bool = True) -> str:
    """Return the folder in which `from_pretrained` finds the model `name`; download a hub model if necessary.

    Args:
        name: "tiny", a folder, or a name on the Hugging Face hub.
        kind: "bert", "gpt2" or "t5", what the model must be.
        weights: False if only the configuration is wanted.

    Raises InputError if a file is missing or damaged, if it is another kind of model, or if the hub cannot be reached.
    """
    assert kind in KINDS, kind
    quiet_transformers()
    if name == "tiny":
        return str(tiny_model_folder(kind))
    folder, copy = Path(name).expanduser(), "copy it again"
    if not folder.exists():
        folder = _from_hub(name, MODEL_FLAG, SMALL_FILES, lambda folder: (folder / "config.json").exists())
        for pattern in WEIGHTS if weights else ():
            if not _has_weights(folder):
                folder = _from_hub(name, MODEL_FLAG, (pattern,), _has_weights)
        copy += f", or delete {folder.parents[1]} to download the model again"
    if not (folder / "config.json").is_file():
        raise InputError(f"{MODEL_FLAG}: {folder} is not a model: it has no config.json; copy the folder, or use tiny")
    actual = read_json(folder / "config.json", MODEL_FLAG).get("model_type")
    if actual != kind:
        raise InputError(f"{MODEL_FLAG}: expected a model of type {kind}, {folder} holds {actual}; name another model")
    if weights:
        _check_weights(folder, copy)
    return str(folder.absolute())


def load_tokenizer(name: str, kind: str, lower_case: bool = False) -> "PreTrainedTokenizerFast":
    """Return the fast tokenizer `name`: "tiny", a model's folder or hub name, or a folder with only a vocabulary.

    Args:
        kind: "bert", "gpt2" or "t5": what a lone vocabulary is for (vocab.txt; vocab.json and merges.txt).
        lower_case: convert all text to lower case (BERT). Otherwise a tokenizer follows its own settings; if it has
            none, it keeps upper case.

    Raises InputError if the files are missing or damaged, or if the hub cannot be reached.
    """
    assert kind in KINDS, kind
    quiet_transformers()
    folder = tiny_model_folder(kind) if name == "tiny" else Path(name).expanduser()
    if not folder.exists():
        folder = _from_hub(name, TOKENIZER_FLAG, SMALL_FILES, lambda folder: _has_tokenizer(folder, kind))
    if not _has_tokenizer(folder, kind):
        vocabulary = " and ".join(VOCABULARIES[kind])
        raise InputError(f"{TOKENIZER_FLAG}: {folder} holds no tokenizer: expected tokenizer.json, or {vocabulary}")
    names_its_class = (folder / "config.json").exists() or (folder / "tokenizer_config.json").exists()
    reader: Any = getattr(transformers, "AutoTokenizer" if names_its_class else READERS[kind])
    settings = {"do_lower_case": lower_case or _lowers(folder)} if kind == "bert" else {}
    try:
        tokenizer = reader.from_pretrained(str(folder), **settings)
    except Exception as error:  # the libraries raise a dozen kinds; all of them mean that the files are not right
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{TOKENIZER_FLAG}: cannot read the tokenizer in {folder} ({reason}); copy it again"
        ) from error
    if not tokenizer.is_fast:
        raise InputError(f"{TOKENIZER_FLAG}: {folder} holds no fast tokenizer; save it with a tokenizer.json")
    pieces = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    needed = "[UNK]" if kind == "bert" else "a"
    if needed not in pieces and tokenizer.unk_token not in pieces:
        raise InputError(
            f"{TOKENIZER_FLAG}: {folder}: expected a vocabulary with {needed}, got one without; copy it again"
        )
    return tokenizer


PROBE = "Training  on 4 workers:\n\tthe gradients' mean, naïve? 50,257 ≠ 1024\u2028日本"


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a fingerprint that is equal for tokenizers with the same ids for the vocabulary and for a test text."""
    ids = tokenizer.get_vocab()
    words = [*sorted(ids, key=ids.__getitem__), *map(str, tokenizer(PROBE, verbose=False)["input_ids"])]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _has_tokenizer(folder: Path, kind: str) -> bool:
    return (folder / "tokenizer.json").is_file() or all((folder / name).is_file() for name in VOCABULARIES[kind])


def _lowers(folder: Path) -> bool:
    """Return whether a BERT tokenizer's files ask for lower case.

    If they say nothing, transformers would convert all text to lower case.
    """
    settings = read_json(folder / "tokenizer_config.json", TOKENIZER_FLAG, default={})
    if "do_lower_case" in settings:
        return bool(settings["do_lower_case"])
    normalizer = read_json(folder / "tokenizer.json", TOKENIZER_FLAG, default={}).get("normalizer") or {}
    return bool(normalizer.get("lowercase", False))


def _from_hub(name: str, flag: str, patterns: tuple[str, ...], is_enough: Callable[[Path], bool]) -> Path:
    """Return the hub's cached folder of model `name`; download the files that match, unless those there are enough.

    Raises InputError within seconds if the name is not a hub's, or if the hub does not know it or does not answer.
    """
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise InputError(f"{flag}: there is no folder {name}; name a folder, a hub model or tiny")
    by_hand = f"copy the model's folder here and pass its path with {flag}, or use tiny"
    # Files in sub-folders are for other frameworks.
    fetch = functools.partial(snapshot_download, name, allow_patterns=list(patterns), ignore_patterns="*/*")
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(fetch(local_files_only=True))
            if is_enough(folder):
                return folder
        # One question first: snapshot_download would ask a hub that does not answer for many minutes.
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5)
        return Path(fetch())
    except GatedRepoError:
        raise InputError(f"{flag}: {name} needs an account that has accepted its terms; {by_hand}") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(f"{flag}: no folder and no hub model is called {name}; check the name, or use tiny") from None
    except Exception as error:  # a dozen kinds: no network, HF_HUB_OFFLINE, a proxy, a repository without this file
        reason = f"there is no folder {name}, and the hub cannot be reached ({type(error).__name__})"
        raise InputError(f"{flag}: {reason}; {by_hand}") from None


def _weights_of(folder: Path) -> list[Path]:
    """Return the files with a model's weights, in today's format or the one before; [] if there are none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            parts = read_json(index, MODEL_FLAG).get("weight_map")
            if not isinstance(parts, dict):
                raise InputError(f"{MODEL_FLAG}: {index}: expected a weight_map with names of files; copy it again")
            return [folder / str(part) for part in sorted(set(parts.values()))]
    return []


def _has_weights(folder: Path) -> bool:
    files = _weights_of(folder)
    return bool(files) and all(file.exists() for file in files)


def _check_weights(folder: Path, copy: str) -> None:
    """Raise InputError if a file with weights is missing or cut off; `copy` says how to get it again."""
    files = _weights_of(folder)
    if not files:
        raise InputError(f"{MODEL_FLAG}: {folder} is not a model: it has no model.safetensors; copy the whole folder")
    for path in files:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):  # compares the header with the file's size
                    continue
            with open(path, "rb") as file:  # torch.save writes a zip archive, and wrote a pickle before torch 1.6
                if not zipfile.is_zipfile(file) and (file.seek(0), file.read(1))[1] != b"\x80":
                    raise ValueError("it holds no weights, or was cut off")
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{MODEL_FLAG}: {path} is damaged ({error}); {copy}") from error


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
