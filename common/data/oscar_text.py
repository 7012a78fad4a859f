"""Text as a stream of documents: OSCAR 23.01 records, or plain text (OSCAR 2019) with one document per line.

At any time, only a piece of a file, one line and one document are in memory, however large the file is.
A line ends only at "\\n". Python's splitlines() would also split at U+2028 and U+0085, which occur inside
OSCAR's documents. Text that cannot be read stops the run, with file and line; nothing is left out silently.
"""

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from common.errors import InputError

PIECE = 1 << 20  # bytes read from a file at once
ZSTD_PIECE = 1 << 11  # compressed bytes: repeated text can grow by a factor of 10,000 when it is unpacked
LONGEST_LINE = 1 << 24  # bytes; text8, for one, is a single line of 100 MB
LONGEST_DOCUMENT = 1 << 20  # characters; the tokenizer needs about a hundred bytes for each

RECORD_SUFFIXES = (".jsonl", ".json", ".ndjson")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
HUB_FILES = "hf://datasets/oscar-corpus/OSCAR-2301/{language}_meta/*.jsonl.zst"


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as 100MB (10^8), 64KiB (2^16), 1.5GB or 250000; None for "all"."""
    if text.strip().lower() == "all":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS or (size := round(float(match[1]) * UNITS[match[2]])) < 1:
        raise InputError(f"size: expected a number of bytes such as 100MB, 64KiB or 250000, or all; got {text!r}")
    return size


class LimitedText:
    """Yields documents until their total size would exceed `size` bytes (UTF-8).

    It counts and hashes them: `documents`, `bytes`, `sha256`. `cut` says whether the limit left something out.
    """

    def __init__(self, documents: Iterable[str], size: int | None = None):
        self._source, self.size, self._hash = documents, size, hashlib.sha256()
        self.documents = self.bytes = 0
        self.cut = False

    def __iter__(self) -> Iterator[str]:
        for document in self._source:
            data = document.encode()
            if self.size is not None and self.bytes + len(data) > self.size:
                self.cut = True
                return
            self.documents += 1
            self.bytes += len(data)
            self._hash.update(data + b"\n")
            yield document

    @property
    def sha256(self) -> str:
        """Of the documents that passed, each followed by a line feed."""
        return self._hash.hexdigest()


def find_files(inputs: Iterable[str | Path]) -> list[Path]:
    """Return the files in `inputs`, and the text files of the folders in `inputs`, with part_2 before part_10."""
    files: list[Path] = []
    for given in map(Path, inputs):
        if given.is_dir():
            found = [path for path in given.rglob("*") if path.is_file() and _looks_like_text(path)]
            if not found:
                kinds = ".txt, .jsonl, .txt.gz, .jsonl.zst"
                raise InputError(f"{given}: expected text files ({kinds}) in this folder, got none; name another")
            files += sorted(found, key=_natural_order)
        elif given.exists():
            files.append(given)
        else:
            raise InputError(f"{given}: there is no such file or folder; check the path")
    return files


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """Yield the documents of the files, in order; empty ones (only white space) are left out.

    Plain text: every line is a document. Records (.jsonl, .json, .ndjson; OSCAR 23.01): every line is a JSON object,
    its "content" is the document. Both may be compressed (.zst, .gz). A document of more than
    LONGEST_DOCUMENT characters is split into several.

    Raises InputError, with file and line, for text that is not UTF-8, a record that is not valid, and a compressed file
    that is damaged or incomplete.
    """
    for path in files:
        read = _read_record if _unpacked_name(path).endswith(RECORD_SUFFIXES) else _read_plain
        for number, line in _split_lines(_unpack(path)):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield from _cut_long(read(line, f"{path}, line {number}"))


def hub_documents(language: str, files: str = HUB_FILES) -> Iterator[str]:
    """Yield the records of OSCAR 23.01 from the hub; nothing is stored on disk.

    You must have accepted its terms on the hub, and you need a token. Raises InputError if one of these is missing.
    """
    from datasets import load_dataset  # here, because these two take a second to import and few need them
    from huggingface_hub import get_token

    if files.startswith("hf://") and not get_token():
        raise InputError(
            "--hub: OSCAR 23.01 needs a Hugging Face token: accept its terms at huggingface.co/datasets/oscar-corpus/"
            "OSCAR-2301, then set HF_TOKEN or run `hf auth login`; or name local files with --input"
        )
    files = files.format(language=language)
    try:
        # As lines, not as JSON: so a broken record is found, and named, by the same code as in a local file.
        lines = load_dataset("text", data_files=files, split="train", streaming=True)
        for number, row in enumerate(lines, start=1):
            yield from _cut_long(_read_record(row["text"].encode(), f"{files}, record {number}"))
    except InputError:
        raise
    except Exception as error:  # whatever the network, the hub and the libraries in between may raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(
            f"--hub: could not read {files} ({reason}); try again, or name local files with --input"
        ) from error


def _looks_like_text(path: Path) -> bool:
    return _unpacked_name(path).endswith((".txt", *RECORD_SUFFIXES)) and not path.name.startswith(".")


def _unpacked_name(path: Path) -> str:
    return path.name.lower().removesuffix(".zst").removesuffix(".gz")


def _natural_order(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _unpack(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, piece by piece."""
    try:
        with open(path, "rb") as file:
            if path.suffix.lower() == ".zst":
                yield from _unpack_zstd(iter(lambda: file.read(ZSTD_PIECE), b""))
            elif path.suffix.lower() == ".gz":
                with gzip.open(file) as unpacked:
                    yield from iter(lambda: unpacked.read(PIECE), b"")
            else:
                yield from iter(lambda: file.read(PIECE), b"")
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise InputError(f"{path}: cannot be read to its end ({error}); check the file or download it again") from error


def _unpack_zstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress one or more zstd frames. zstandard's stream reader would not notice that a file is incomplete."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    for piece in pieces:
        while piece:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(piece)
            piece = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("it ends in the middle of a zstd frame")


def _split_lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its end); a line longer than LONGEST_LINE is split."""
    number, rest = 1, bytearray()
    for piece in pieces:
        first, *others = piece.split(b"\n")
        rest += first
        for line in others:
            yield number, bytes(rest)
            number, rest = number + 1, bytearray(line)
        while len(rest) > LONGEST_LINE:
            cut = _place_to_cut(rest)
            yield number, bytes(rest[:cut])
            del rest[:cut]
    if rest:
        yield number, bytes(rest)


def _place_to_cut(line: bytearray) -> int:
    """Return the position of the last space that fits; without one, the last position between two characters."""
    cut = line.rfind(b" ", 1, LONGEST_LINE)
    if cut == -1:
        cut = LONGEST_LINE
        while cut > 1 and line[cut] & 0b1100_0000 == 0b1000_0000:  # inside a character of UTF-8
            cut -= 1
    return cut


def _read_plain(line: bytes, where: str) -> str:
    return _decode(line.removesuffix(b"\r"), where)


def _read_record(line: bytes, where: str) -> str:
    text = _decode(line, where)
    if not text.strip():
        return ""
    try:
        record = json.loads(text)
        content = record["content"] if isinstance(record, dict) else None
        if isinstance(content, str):
            content.encode()  # JSON can write half a surrogate pair, which is no character
            return content
    except KeyError:
        keys = ", ".join(list(record)[:5]) or "nothing"
        raise InputError(
            f'{where}: expected a record with "content", got {keys}; check that this is OSCAR 23.01'
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected one JSON object ({error}); repair or remove the line") from error
    raise InputError(
        f'{where}: expected a JSON object whose "content" is text, got {text[:40]!r}; check that this is OSCAR 23.01'
    )


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: expected UTF-8, got byte 0x{line[error.start]:02x} at place {error.start + 1} of the line; "
            "repair it, for example with iconv -c -f utf-8 -t utf-8"
        ) from error


def _cut_long(document: str) -> Iterator[str]:
    while len(document) > LONGEST_DOCUMENT:
        cut = document.rfind(" ", 1, LONGEST_DOCUMENT)
        cut = LONGEST_DOCUMENT if cut == -1 else cut
        yield document[:cut]
        document = document[cut:]
    if document.strip():
        yield document
