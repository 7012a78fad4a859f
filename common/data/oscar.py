"""OSCAR text as blocks of GPT-2 tokens: tokenised once, then memory-mapped at every start.

`--data_dir oscar-100MB` of the GPT-2 scripts trains on a folder that prepare_oscar.py has made.
common/data/oscar_text.py reads text; common/data/token_folder.py describes the folder. One document in twenty
(--validation 0.05) is used for validation, the same ones in every run.
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from common.cache import cached
from common.data.oscar_text import find_files, read_documents
from common.data.sample_data import oscar_sample_file
from common.data.token_folder import (
    SPLITS,
    Manifest,
    fingerprint,
    make_request,
    name_of,
    open_stream,
    read_manifest,
    write_folder,
)
from common.errors import InputError
from common.paths import cache_dir

SIZE = 100_000_000  # bytes of text, as the course's GPT-2 project takes
BLOCK_SIZE = 1024  # tokens, GPT-2's context
VALIDATION = 0.05


class HasData(Protocol):
    """The entries of a run's configuration that are read here."""

    @property
    def data_dir(self) -> Path | None: ...

    @property
    def model_max_length(self) -> int: ...


class TokenBlocks(Dataset):
    """Blocks of T token ids. Item i is an int64 tensor (T,); what does not fill a block at the end is left out."""

    def __init__(self, stream: np.ndarray, block_size: int):
        blocks = len(stream) // block_size
        self.blocks = stream[: blocks * block_size].reshape(blocks, block_size)  # (number of blocks, T), still on disk

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.blocks[index].astype(np.int64))


@dataclass(frozen=True)
class OscarData:
    """Items of `train` and `validation` are int64 tensors (T,) with T = block_size, ids below vocab_size."""

    train: TokenBlocks
    validation: TokenBlocks  # empty where there are too few documents for it
    vocab_size: int
    block_size: int


def load_blocks(source: HasData | str | Path, tokenizer: object, block_size: int | None = None) -> OscarData:
    """Return training and validation text for a run, in blocks of T tokens.

    Args:
        source: a run's configuration, or a path. A folder made by `python prepare_oscar.py` is memory-mapped. Any
            other folder or file is text: its first 100 MB are tokenised into the cache, once. One of several ranks
            does this, and the others wait. If the configuration's data_dir is None, this is the embedded sample.
        tokenizer: a fast Hugging Face tokenizer with an end-of-text token.
        block_size: T; None: the configuration's model_max_length, or the block size of the folder.

    Raises InputError if a file is missing, incomplete or has changed, if the folder was made with another tokenizer, or
    if the training text does not fill one block.
    """
    if not isinstance(source, (str, Path)):
        block_size = block_size or source.model_max_length
        source = source.data_dir or oscar_sample_file()
    folder = Path(source)
    if not is_made(folder):
        folder = _tokenised_in_cache(folder, tokenizer)
    manifest = read_manifest(folder)
    _check_tokenizer(folder, manifest, tokenizer)
    block_size = block_size or manifest.request.block_size
    train, validation = (TokenBlocks(open_stream(folder, split, manifest), block_size) for split in SPLITS)
    if not len(train):
        raise InputError(
            f"{folder / 'train.bin'}: expected at least one block of {block_size} tokens, got "
            f"{manifest.tokens['train']} tokens; use shorter blocks (--model_max_length) or more text"
        )
    return OscarData(train, validation, manifest.vocab_size, block_size)


def is_made(folder: Path) -> bool:
    """Return whether this is a folder of token blocks, complete or not."""
    return any((folder / name).exists() for name in ("manifest.json", "train.bin"))


def _check_tokenizer(folder: Path, manifest: Manifest, tokenizer: object) -> None:
    if manifest.request.tokenizer_fingerprint != fingerprint(tokenizer):
        raise InputError(
            f"{folder / 'manifest.json'}: the text was tokenised with {manifest.tokenizer} ({manifest.vocab_size} "
            f"tokens), but this run's tokenizer is {name_of(tokenizer)}; use the same tokenizer, or tokenise the text "
            "again: python prepare_oscar.py --tokenizer"
        )


def _tokenised_in_cache(text: Path, tokenizer: object) -> Path:
    """Return the token blocks of a file or folder of text; tokenise it now if it is not in the cache."""
    files = find_files([text])
    request = make_request(describe(files), tokenizer, SIZE, BLOCK_SIZE, VALIDATION)
    folder = cache_dir("oscar") / hashlib.sha256(json.dumps(asdict(request)).encode()).hexdigest()[:16]

    def build(partial: Path) -> None:
        manifest = write_folder(partial, read_documents(files), tokenizer, request)
        of = f"the first {SIZE / 1e6:.0f} MB of " if sum(file.stat().st_size for file in files) > SIZE else ""
        print(f"tokenised {of}{text}: {manifest}; kept in {folder}", file=sys.stderr)

    return cached(folder, build)


def describe(files: list[Path]) -> list[dict]:
    """Return what identifies files without reading them: name, size, time of the last change."""
    return [{"name": file.name, "bytes": file.stat().st_size, "modified": file.stat().st_mtime_ns} for file in files]
