"""OSCAR text as blocks of GPT-2 tokens: tokenised once, then memory-mapped at every start.

`--data_dir oscar-100MB` of the GPT-2 scripts trains on a folder that prepare_oscar.py has made:

    train.bin, validation.bin   streams of token ids, 32 bits each; every document is followed by the end-of-text token
    manifest.json               what was tokenised, and with which tokenizer

A block is the next T ids of a stream, so one folder serves every block length. One document in twenty is used for
validation, the same ones in every run. The cache (common/cache.py) makes the folder: it gets its name when it is
complete, and its files' sizes are compared when it is opened. common/data/oscar_text.py reads the text with Hugging
Face datasets.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from common.cache import cached, is_complete
from common.config import Gpt2Config
from common.data.oscar_text import find_files, read_documents
from common.data.sample_data import oscar_sample_file
from common.errors import InputError
from common.models.load import tokenizer_fingerprint
from common.paths import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VERSION = 3  # part of the cached folder's name: increase it with every change to the files
SIZE = 100_000_000  # bytes of text, as the course's GPT-2 project takes
HELD_OUT = 20  # every 20th document is used for validation
SPLITS = ("train", "validation")
DTYPE = "<i4"
BATCH_CHARACTERS = 1 << 20  # for the tokenizer at once: enough for all its threads, and the bound on memory
MAKE_AGAIN = "rebuild it with `python prepare_oscar.py --overwrite`"


@dataclass(frozen=True)
class Manifest:
    """What a folder of token blocks holds."""

    tokenizer: str  # its name, for people; the fingerprint is what is compared
    fingerprint: str
    documents: int
    text_bytes: int
    tokens: dict[str, int]  # of each split

    def __str__(self) -> str:
        return (
            f"{self.documents} documents, {self.text_bytes / 1e6:.1f} MB of text; {self.tokens['train']} tokens for "
            f"training, {self.tokens['validation']} for validation"
        )


class TokenBlocks(Dataset):
    """Blocks of T token ids. Item i is an int64 tensor (T,); what does not fill a block at the end is left out."""

    def __init__(self, file: Path, block_size: int):
        # Read-only, still on disk. A file without a byte cannot be mapped.
        stream = np.memmap(file, DTYPE, mode="r") if file.stat().st_size else np.empty(0, DTYPE)
        blocks = len(stream) // block_size
        self.blocks = stream[: blocks * block_size].reshape(blocks, block_size)  # (number of blocks, T)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.blocks[index].astype(np.int64))


@dataclass(frozen=True)
class OscarData:
    """Items of `train` and `validation` are int64 tensors (T,)."""

    train: TokenBlocks
    validation: TokenBlocks  # empty where there are too few documents for it


def load_blocks(config: Gpt2Config, tokenizer: "PreTrainedTokenizerFast") -> OscarData:
    """Return training and validation text of a run, in blocks of --model_max_length tokens; see read_blocks."""
    return read_blocks(config.data_dir or oscar_sample_file(), tokenizer, config.model_max_length)


def read_blocks(path: Path, tokenizer: "PreTrainedTokenizerFast", block_size: int) -> OscarData:
    """Return training and validation text, in blocks of T tokens.

    Args:
        path: a folder made by `python prepare_oscar.py` is memory-mapped. Any other folder or file is text: its first
            100 MB are tokenised into the cache, once. One of several ranks does this, and the others wait.
        tokenizer: a fast Hugging Face tokenizer with an end-of-text token.
        block_size: T.

    Raises InputError if a file is missing or cut off, if the folder was made with another tokenizer, or if the training
    text does not fill one block.
    """
    folder = path if is_made(path) else _tokenised_in_cache(path, tokenizer)
    manifest = read_manifest(folder)
    if manifest.fingerprint != tokenizer_fingerprint(tokenizer):
        raise InputError(
            f"{folder / 'manifest.json'}: the text was tokenised with {manifest.tokenizer}, this run's tokenizer is "
            f"{tokenizer.name_or_path}; use the same one, or tokenise it again: python prepare_oscar.py --tokenizer"
        )
    train, validation = (TokenBlocks(folder / f"{split}.bin", block_size) for split in SPLITS)
    if not len(train):
        raise InputError(
            f"{folder / 'train.bin'}: expected at least one block of {block_size} tokens, got "
            f"{manifest.tokens['train']} tokens; use shorter blocks (--model_max_length) or more text"
        )
    return OscarData(train, validation)


def is_made(folder: Path) -> bool:
    """Return whether this is a folder of token blocks, complete or not."""
    return any((folder / name).exists() for name in ("manifest.json", "train.bin"))


def _tokenised_in_cache(text: Path, tokenizer: "PreTrainedTokenizerFast") -> Path:
    """Return the token blocks of a file or folder of text; tokenise it now if it is not in the cache."""
    files = find_files([text])
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([VERSION, states, tokenizer_fingerprint(tokenizer)]).encode()).hexdigest()[:16]
    folder = cache_dir("oscar") / key

    def build(partial: Path) -> None:
        manifest = write_folder(partial, files, tokenizer, SIZE)
        of = f"the first {SIZE / 1e6:.0f} MB of " if sum(size for _, size, _ in states) > SIZE else ""
        print(f"tokenised {of}{text}: {manifest}; kept in {folder}", file=sys.stderr)

    return cached(folder, build)


def write_folder(
    folder: Path, files: Sequence[str | Path], tokenizer: "PreTrainedTokenizerFast", size: int | None
) -> Manifest:
    """Tokenise the first `size` bytes of text (None: all) into `folder`. Raises InputError if there is no text."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{tokenizer.name_or_path}: expected a tokenizer with an end-of-text token; use GPT-2's, or tiny"
        )
    tokens, count, text_bytes = dict.fromkeys(SPLITS, 0), 0, 0
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "validation.bin", "wb") as held_out,
        tqdm(desc="tokenising", unit="B", unit_scale=True, total=size, disable=None) as progress,
    ):
        for batch in _batches(read_documents(files), size):
            for ids in encode(batch, tokenizer):
                count += 1
                split, file = ("train", train) if count % HELD_OUT else ("validation", held_out)
                stream = np.array([*ids, tokenizer.eos_token_id], DTYPE)
                stream.tofile(file)
                tokens[split] += len(stream)
            read = sum(len(document.encode()) for document in batch)
            text_bytes += read
            progress.update(read)
    if not count:
        names = ", ".join(Path(file).name for file in files)
        raise InputError(
            f"{names}: expected at least one document with text within {size or 'all'} bytes, got none; "
            "pass files that contain text, or a larger --size"
        )
    manifest = Manifest(tokenizer.name_or_path, tokenizer_fingerprint(tokenizer), count, text_bytes, tokens)
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    return manifest


def encode(texts: list[str], tokenizer: "PreTrainedTokenizerFast") -> list[list[int]]:
    """Return the ids of each text. "<|endoftext|>" inside a text is ordinary text; nothing is cut or padded."""
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def _batches(documents: Iterable[str], size: int | None) -> Iterator[list[str]]:
    """Yield lists of documents of about BATCH_CHARACTERS, until their total size would exceed `size` bytes (UTF-8)."""
    batch, characters, total = list[str](), 0, 0
    for document in documents:
        total += len(document.encode())
        if size is not None and total > size:
            break
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a complete folder. Raises InputError if something in it is missing or cut off."""
    if not is_complete(folder):
        raise InputError(f"{folder}: is no complete folder of token blocks; {MAKE_AGAIN}")
    try:
        return Manifest(**json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / 'manifest.json'}: cannot be read ({error}); {MAKE_AGAIN}") from error
