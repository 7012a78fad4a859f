"""Writes documents to a folder of token blocks, with a fast tokenizer; the command is prepare_oscar.py."""

import contextlib
import hashlib
import itertools
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.data.oscar_text import LimitedText
from common.data.token_map import (
    FILES,
    SPLITS,
    VERSION,
    Manifest,
    StreamWriter,
    open_stream,
    read_manifest,
    write_manifest,
)
from common.errors import InputError
from common.paths import locked

BATCH_CHARACTERS = 1 << 20  # for the tokenizer at once: enough for all its threads, and the bound on memory
PROBE = "Training  on 4 workers:\n\tthe gradients' mean, naïve? 50,257 ≠ 1024\u2028日本"


def fingerprint(tokenizer: Any) -> str:
    """Return a fingerprint that is equal for tokenizers with the same ids for the vocabulary and for a test text.

    Of a large vocabulary, only about 4,000 evenly spaced words are used: all of GPT-2's would make every start slow.
    """
    backend, size = _backend(tokenizer), len(tokenizer)
    words = [backend.id_to_token(i) or "" for i in range(0, size, 1 + size // 4096)]
    with text_only(backend):
        words += map(str, backend.encode(PROBE, add_special_tokens=False).ids)
    return hashlib.sha256("\0".join([str(size), *words]).encode()).hexdigest()


def tokenise(
    documents: Iterable[str],
    sources: list[dict],
    tokenizer: object,
    output: Path,
    *,
    size: int | None,
    block_size: int,
    validation: float,
    overwrite: bool = False,
) -> tuple[Manifest, bool]:
    """Write `documents`, up to `size` bytes of text, as token blocks; returns the manifest and whether it is new.

    A finished folder is kept if it was made in the same way from the same `sources` (which identify the files). A new
    one gets its final name when it is complete, so a killed run leaves no incomplete folder under this name.

    Raises InputError if `output` holds anything else. With `overwrite`, another folder of token blocks is replaced, but
    never other files.
    """
    request = make_request(sources, tokenizer, size=size, block_size=block_size, validation=validation)
    output = output.absolute()
    partial = output.with_name(f".{output.name}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with locked(partial):  # one of several processes writes; the others wait here and then find the finished folder
            finished = _finished(output, request, overwrite)
            if finished:
                return finished, False
            shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
            partial.mkdir()
            try:
                manifest = write_blocks(LimitedText(documents, size), request, tokenizer, partial)
                _rename(partial, output)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error}); name another folder") from error
    return manifest, True


def make_request(
    sources: list[dict], tokenizer: object, *, size: int | None, block_size: int, validation: float
) -> dict[str, Any]:
    """Return the settings that decide what the folder holds, as in its manifest. Raises InputError."""
    if block_size < 1:
        raise InputError(f"--block_size: expected 1 or more tokens, got {block_size}")
    if not 0 <= validation < 1:
        raise InputError(
            f"--validation: expected a fraction of at least 0 and below 1, for example 0.05; got {validation}"
        )
    return {
        "version": VERSION,
        "tokenizer_fingerprint": fingerprint(tokenizer),
        "block_size": block_size,
        "validation_fraction": validation,
        "size_limit": size,
        "sources": sources,
    }


def _finished(output: Path, request: dict, overwrite: bool) -> Manifest | None:
    """Return the manifest of an earlier run's folder that can be used; None if there is no folder yet."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not output.is_dir() or not {path.name for path in output.iterdir()} <= FILES:
        raise InputError(f"{output}: expected a new name, got a path that holds no token blocks; name another folder")
    if overwrite:
        return None
    manifest = read_manifest(output)
    for name, wanted in request.items():
        if getattr(manifest, name) != wanted:
            raise InputError(
                f"{output}: was made with different {name} ({_short(getattr(manifest, name))}, now {_short(wanted)}); "
                "name another folder, or replace it with --overwrite"
            )
    for split in SPLITS:
        open_stream(output, split, manifest)  # complains if the file is damaged
    return manifest


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def write_blocks(text: LimitedText, request: dict, tokenizer: Any, folder: Path) -> Manifest:
    """Write train.bin, validation.bin and manifest.json into `folder`; raises InputError if there is no text."""
    end_of_text, vocab_size = tokenizer.eos_token_id, len(tokenizer)
    if end_of_text is None:
        raise InputError(f"{name_of(tokenizer)}: expected a tokenizer with an end-of-text token; use GPT-2's, or tiny")
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    with (
        StreamWriter(folder / "train.bin", dtype, end_of_text) as train,
        StreamWriter(folder / "validation.bin", dtype, end_of_text) as held_out,
        tqdm(desc="tokenising", unit="B", unit_scale=True, total=text.size, disable=None) as progress,
    ):
        to_validation = _every_so_many(request["validation_fraction"])
        for encodings in _encode(make_batches(text), tokenizer):
            for encoding, hold_out in zip(encodings, to_validation, strict=False):
                (held_out if hold_out else train).add(encoding.ids)
            train.flush()
            held_out.flush()
            progress.update(text.bytes - progress.n)
    if not text.documents:
        names = ", ".join(source["name"] for source in request["sources"])
        limit = f" within {text.size} bytes; use a larger --size" if text.cut else "; pass files that contain text"
        raise InputError(f"{names}: expected at least one document with text, got none{limit}")
    manifest = Manifest(
        **request,
        tokenizer=name_of(tokenizer),
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        dtype=dtype,
        text_documents=text.documents,
        text_bytes=text.bytes,
        text_sha256=text.sha256,
        train=train.describe(request["block_size"]),
        validation=held_out.describe(request["block_size"]),
    )
    write_manifest(folder, manifest)  # last: it marks the folder as complete
    return manifest


def _every_so_many(fraction: float) -> Iterator[bool]:
    """Return True for `fraction` of all documents, evenly spaced: the 20th, the 40th and so on for 0.05."""
    return (math.floor(i * fraction) > math.floor((i - 1) * fraction) for i in itertools.count(1))


def make_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of documents of about BATCH_CHARACTERS."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batches: Iterable[list[str]], tokenizer: object) -> Iterator[list[Any]]:
    """Yield the tokenizer's encodings of each batch.

    While one batch is written, threads without Python's lock encode the next one. So reading and writing cost almost
    nothing.
    """
    backend = _backend(tokenizer)
    with text_only(backend), ThreadPoolExecutor(max_workers=1) as ahead:
        waiting = None
        for batch in batches:
            started = ahead.submit(backend.encode_batch_fast, batch, add_special_tokens=False)
            if waiting:
                yield waiting.result()
            waiting = started
        if waiting:
            yield waiting.result()


@contextlib.contextmanager
def text_only(backend: Any) -> Iterator[None]:
    """In this block, nothing is cut or padded, and "<|endoftext|>" inside a document is ordinary text."""
    truncation, padding, special = backend.truncation, backend.padding, backend.encode_special_tokens
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    try:
        yield
    finally:
        backend.encode_special_tokens = special
        if truncation:
            backend.enable_truncation(**truncation)
        if padding:
            backend.enable_padding(**padding)


def _backend(tokenizer: object) -> Any:
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise InputError(f"{name_of(tokenizer)}: expected a fast tokenizer (tokenizer.json), got a slow one")
    return tokenizer.backend_tokenizer


def name_of(tokenizer: object) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _rename(partial: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        os.replace(output, old)
    os.replace(partial, output)
    shutil.rmtree(old, ignore_errors=True)
