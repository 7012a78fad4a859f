"""A folder of token ids: train.bin and validation.bin, which are memory-mapped, and manifest.json.

Each .bin file is one stream of ids, 16 or 32 bits each, little-endian, without a header. Every document is followed by
the end-of-text token. A training block is the next T ids of the stream, so one folder serves every block length.
The cache (common/cache.py) makes the folder: it gets its name when it is complete, and is checked when it is opened.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.cache import damage
from common.errors import InputError

SPLITS = ("train", "validation")
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BATCH_CHARACTERS = 1 << 20  # for the tokenizer at once: enough for all its threads, and the bound on memory
PROBE = "Training  on 4 workers:\n\tthe gradients' mean, naïve? 50,257 ≠ 1024\u2028日本"
MAKE_AGAIN = "rebuild it with `python prepare_oscar.py --overwrite`"


@dataclass(frozen=True)
class Request:
    """Everything that decides what a folder holds."""

    sources: list[dict]  # of each file: name, bytes, modified
    tokenizer_fingerprint: str
    size_limit: int | None  # bytes of text, None: no limit
    block_size: int  # tokens, where a run names no other
    validation_fraction: float  # of the documents, evenly spaced: the 20th, the 40th and so on for 0.05


@dataclass(frozen=True)
class Manifest:
    """The folder's contents and its source. Equal requests make equal folders."""

    request: Request
    tokenizer: str  # its name, for people; the fingerprint is what is compared
    vocab_size: int
    dtype: str
    documents: int
    text_bytes: int
    tokens: dict[str, int]  # of each split

    def __str__(self) -> str:
        train, validation = (
            f"({self.tokens[split] // self.request.block_size} blocks of {self.request.block_size})" for split in SPLITS
        )
        return (
            f"{self.documents} documents, {self.text_bytes / 1e6:.1f} MB of text; {self.tokens['train']} tokens for "
            f"training {train}, {self.tokens['validation']} for validation {validation}"
        )


def make_request(
    sources: list[dict], tokenizer: object, size: int | None, block_size: int, validation: float
) -> Request:
    """Return a request with valid settings. Raises InputError."""
    if block_size < 1:
        raise InputError(f"--block_size: expected 1 or more tokens, got {block_size}")
    if not 0 <= validation < 1:
        raise InputError(
            f"--validation: expected a fraction of at least 0 and below 1, for example 0.05; got {validation}"
        )
    return Request(sources, fingerprint(tokenizer), size, block_size, validation)


def fingerprint(tokenizer: Any) -> str:
    """Return a fingerprint that is equal for tokenizers with the same ids for the vocabulary and for a test text.

    Of a large vocabulary, only about 4,000 evenly spaced words are used: all of GPT-2's would make every start slow.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise InputError(f"{name_of(tokenizer)}: expected a fast tokenizer (tokenizer.json), got a slow one")
    size = len(tokenizer)
    words = [tokenizer.backend_tokenizer.id_to_token(i) or "" for i in range(0, size, 1 + size // 4096)]
    words += map(str, encode([PROBE], tokenizer)[0])
    return hashlib.sha256("\0".join([str(size), *words]).encode()).hexdigest()


def name_of(tokenizer: object) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def encode(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Return the ids of each text. "<|endoftext|>" inside a text is ordinary text; nothing is cut or padded."""
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def write_folder(folder: Path, documents: Iterable[str], tokenizer: Any, request: Request) -> Manifest:
    """Tokenise documents, up to the request's size, into `folder`. Raises InputError if there is no text."""
    if tokenizer.eos_token_id is None:
        raise InputError(f"{name_of(tokenizer)}: expected a tokenizer with an end-of-text token; use GPT-2's, or tiny")
    dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
    tokens, count, text_bytes = dict.fromkeys(SPLITS, 0), 0, 0
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "validation.bin", "wb") as held_out,
        tqdm(desc="tokenising", unit="B", unit_scale=True, total=request.size_limit, disable=None) as progress,
    ):
        for batch in _batches(_up_to(documents, request.size_limit)):
            for ids in encode(batch, tokenizer):
                count += 1
                split = SPLITS[_is_held_out(count, request.validation_fraction)]
                stream = np.array([*ids, tokenizer.eos_token_id], DTYPES[dtype])
                stream.tofile(held_out if split == "validation" else train)
                tokens[split] += len(stream)
            size = sum(len(document.encode()) for document in batch)
            text_bytes += size
            progress.update(size)
    if not count:
        names = ", ".join(source["name"] for source in request.sources)
        raise InputError(
            f"{names}: expected at least one document with text within {request.size_limit or 'all'} bytes, got none; "
            "pass files that contain text, or a larger --size"
        )
    manifest = Manifest(request, name_of(tokenizer), len(tokenizer), dtype, count, text_bytes, tokens)
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    return manifest


def _up_to(documents: Iterable[str], size: int | None) -> Iterator[str]:
    """Yield documents until their total size would exceed `size` bytes (UTF-8)."""
    total = 0
    for document in documents:
        total += len(document.encode())
        if size is not None and total > size:
            return
        yield document


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of documents of about BATCH_CHARACTERS."""
    batch, characters = list[str](), 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _is_held_out(number: int, fraction: float) -> bool:
    return int(number * fraction) > int((number - 1) * fraction)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a complete folder. Raises InputError if something in it is missing or has changed."""
    if reason := damage(folder):
        raise InputError(f"{folder}: is no complete folder of token blocks ({reason}); {MAKE_AGAIN}")
    try:
        values = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return Manifest(**{**values, "request": Request(**values["request"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{folder / 'manifest.json'}: cannot be read ({error}); {MAKE_AGAIN}") from error


def open_stream(folder: Path, split: str, manifest: Manifest) -> np.ndarray:
    """Return the ids of one split, (tokens,), memory-mapped read-only."""
    if not manifest.tokens[split]:  # nothing can be mapped then
        return np.empty(0, DTYPES[manifest.dtype])
    return np.memmap(folder / f"{split}.bin", DTYPES[manifest.dtype], mode="r")
