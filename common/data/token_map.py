"""A folder of token ids: train.bin and validation.bin, which are memory-mapped, and manifest.json.

Each .bin file is one stream of ids, 16 or 32 bits each, little-endian, without a header. Every document is followed by
the end-of-text token. A training block is the next T ids of the stream, so one folder serves every block length.
The manifest describes the files; a folder without one is not finished.
"""

import hashlib
import json
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from common.errors import InputError
from common.paths import atomic_write

VERSION = 1  # of the layout above; increase it when the layout or the meaning of the manifest changes
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
SPLITS = ("train", "validation")
FILES = {"train.bin", "validation.bin", "manifest.json"}
END_BYTES = 1 << 16
MAKE_AGAIN = "rebuild it with `python prepare_oscar.py --overwrite`"


@dataclass(frozen=True)
class Stream:
    """The manifest's entry for one .bin file. `blocks` are blocks of the manifest's block_size."""

    documents: int
    tokens: int
    blocks: int
    bytes: int
    ends_sha256: str  # of the first and the last 64 KiB: cheap at every start, and enough to tell files apart


@dataclass(frozen=True)
class Manifest:
    """The contents of the folder and its source. Two runs with equal `request`s make equal folders."""

    version: int
    tokenizer: str  # its name, for people; the fingerprint is what is compared
    tokenizer_fingerprint: str
    vocab_size: int
    end_of_text: int
    dtype: str
    block_size: int
    validation_fraction: float
    size_limit: int | None  # bytes of text, None: no limit
    sources: list[dict]  # per file: name, bytes, modified
    text_documents: int
    text_bytes: int
    text_sha256: str
    train: Stream
    validation: Stream

    @property
    def request(self) -> dict:
        """Return everything that decides what the folder holds."""
        names = ("version", "tokenizer_fingerprint", "block_size", "validation_fraction", "size_limit", "sources")
        return {name: getattr(self, name) for name in names}


class StreamWriter:
    """Appends documents to a .bin file, in a `with` block; only documents since the last flush are in memory."""

    def __init__(self, path: Path, dtype: str, end_of_text: int):
        self._path, self._dtype, self._end_of_text = path, dtype, end_of_text
        self._waiting = array("H" if dtype == "uint16" else "I")
        self.documents = self.tokens = 0

    def __enter__(self) -> "StreamWriter":
        self._file = open(self._path, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, ids: list[int]) -> None:
        """Add one document: its ids, then end-of-text."""
        self._waiting.fromlist(ids)
        self._waiting.append(self._end_of_text)
        self.documents += 1

    def flush(self) -> None:
        """Write what was added since the last flush."""
        np.asarray(self._waiting).astype(DTYPES[self._dtype], copy=False).tofile(self._file)
        self._file.flush()
        self.tokens += len(self._waiting)
        self._waiting = self._waiting[:0]

    def describe(self, block_size: int) -> Stream:
        """Return the manifest's entry for the file."""
        blocks, size = self.tokens // block_size, self._path.stat().st_size
        return Stream(self.documents, self.tokens, blocks, size, _ends_sha256(self._path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with atomic_write(folder / "manifest.json") as file:
        json.dump(asdict(manifest), file, indent=2)
        file.write("\n")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest. Raises InputError if there is none, or if it has a different version."""
    path = folder / "manifest.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path}: not found, so {folder} is not a finished folder of token blocks; {MAKE_AGAIN}"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {MAKE_AGAIN}") from error
    if isinstance(values, dict) and values.get("version") not in (None, VERSION):
        raise InputError(f"{path}: expected version {VERSION}, got {values['version']}; {MAKE_AGAIN}")
    try:
        streams = {name: Stream(**values[name]) for name in SPLITS}
        manifest = Manifest(**{**values, **streams})
        consistent = all(_is_consistent(getattr(manifest, name), manifest) for name in SPLITS)
    except (TypeError, KeyError, ZeroDivisionError):
        consistent = False
    if not consistent:
        raise InputError(f"{path}: its entries are missing or contradict each other; {MAKE_AGAIN}")
    return manifest


def _is_consistent(stream: Stream, manifest: Manifest) -> bool:
    item = np.dtype(DTYPES[manifest.dtype]).itemsize
    return stream.bytes == stream.tokens * item and stream.blocks == stream.tokens // manifest.block_size


def open_stream(folder: Path, name: str, manifest: Manifest) -> np.ndarray:
    """Return the ids of one split, (tokens,), memory-mapped read-only; the size does not affect the time.

    Raises InputError if the file is not the one in the manifest.
    """
    path, stream = folder / f"{name}.bin", getattr(manifest, name)
    try:
        size = path.stat().st_size
        if size != stream.bytes:
            raise InputError(f"{path}: expected {stream.bytes} bytes (manifest.json), got {size}; {MAKE_AGAIN}")
        if _ends_sha256(path) != stream.ends_sha256:
            raise InputError(f"{path}: is not the file that manifest.json describes (different checksum); {MAKE_AGAIN}")
        if size == 0:  # nothing can be mapped then
            return np.empty(0, DTYPES[manifest.dtype])
        return np.memmap(path, DTYPES[manifest.dtype], mode="r")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {MAKE_AGAIN}") from error


def _ends_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(0, path.stat().st_size - END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()
