"""BERT, GPT-2 and T5 by hub name, from a folder, or `tiny`: a small model of each kind, made without a download.

    model_path("tiny", "bert")  -> a folder with config.json, model.safetensors and a tokenizer, as a hub model has them
    model_path("bert-base-cased", "bert"), model_path("/a/folder", "gpt2")  -> where from_pretrained finds the model

Names are checked here, before any rank joins a process group. Later, one rank's error would make the others hang.
"""

import contextlib
import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from common.errors import InputError, reading
from common.models.tiny import tiny_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


KINDS = ("bert", "gpt2", "t5")
TOKENIZER_FLAG = "--tokenizer_name"
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
    folder = Path(name).expanduser()
    if folder.exists():
        copy = "copy it again"
        _check_is_model(folder)
        check_kind(folder, kind)
    else:
        folder = _ask_hub(name, MODEL_FLAG)
        copy = f"copy it again, or delete {folder.parents[1]} to download the model again"
        check_kind(folder, kind)
        if weights and not weights_of(folder):
            _fetch_weights(name)
    if weights:
        check_weights(folder, copy)
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
        folder = _ask_hub(name, TOKENIZER_FLAG)
        if not _has_tokenizer(folder, kind):
            _fetch_tokenizer(name, kind)
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
    """Return a fingerprint that is equal for tokenizers with the same ids for the vocabulary and for a test text.

    Of a large vocabulary, only about 4,000 evenly spaced words are used: all of GPT-2's would make every start slow.
    """
    size = len(tokenizer)
    words = [tokenizer.backend_tokenizer.id_to_token(i) or "" for i in range(0, size, 1 + size // 4096)]
    words += map(str, tokenizer(PROBE, verbose=False)["input_ids"])
    return hashlib.sha256("\0".join([str(size), *words]).encode()).hexdigest()


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


def _check_is_model(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"{MODEL_FLAG}: expected a folder, {folder} is a file; name the folder that contains it")
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{MODEL_FLAG}: {folder} is not a model: it has no config.json; copy the whole folder, or use tiny"
        )


def _ask_hub(name: str, flag: str) -> Path:
    """Return the folder of the hub's cache that holds config.json of model `name`, downloaded if necessary.

    Raises InputError within seconds if the name is not a hub's, or if the hub does not know it or does not answer.
    """
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise InputError(f"{flag}: there is no folder {name}; name a folder, a hub model or tiny")
    by_hand = f"copy the model's folder here and pass its path with {flag}, or use tiny"
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(hf_hub_download(name, "config.json", local_files_only=True)).parent
        # One question first: hf_hub_download would ask a hub that does not answer for many minutes.
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5)
        return Path(hf_hub_download(name, "config.json")).parent
    except GatedRepoError:
        raise InputError(f"{flag}: {name} needs an account that has accepted its terms; {by_hand}") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(f"{flag}: no folder and no hub model is called {name}; check the name, or use tiny") from None
    except Exception as error:  # a dozen kinds: no network, HF_HUB_OFFLINE, a proxy, a repository without this file
        reason = f"there is no folder {name}, and the hub cannot be reached ({type(error).__name__})"
        raise InputError(f"{flag}: {reason}; {by_hand}") from None


def _fetch_weights(name: str) -> None:
    """Download a hub model's weights into the hub's cache; several files where an index lists them."""
    for file in WEIGHTS:
        path = _download(name, file, MODEL_FLAG)
        if path:
            for shard in shards_of(path) if path.suffix == ".json" else []:
                _download(name, shard.name, MODEL_FLAG)
            return


def _fetch_tokenizer(name: str, kind: str) -> None:
    """Download a tokenizer's files into the hub's cache. Old models have a vocabulary only, new ones one file."""
    for file in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", *VOCABULARIES[kind]):
        _download(name, file, TOKENIZER_FLAG)


def _download(name: str, file: str, flag: str) -> Path | None:
    """Return one file of a hub model, in the hub's cache; None if the model does not have it."""
    try:
        return Path(hf_hub_download(name, file))
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:
        reason = f"{file} of {name} cannot be fetched ({type(error).__name__})"
        raise InputError(f"{flag}: {reason}; try again, copy the model's folder here, or use tiny") from None


MODEL_FLAG = "--model_name_or_path"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


# The files of a model's folder are checked before any worker joins: which one is to be copied again?


def check_kind(folder: Path, kind: str) -> None:
    """Raise InputError unless config.json says that the folder holds a model of this kind."""
    actual = read_json(folder / "config.json", MODEL_FLAG).get("model_type")
    if actual != kind:
        raise InputError(f"{MODEL_FLAG}: expected a model of type {kind}, {folder} holds {actual}; name another model")


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
