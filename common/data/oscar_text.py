"""Text as a stream of documents: OSCAR 23.01 records, or plain text (OSCAR 2019) with one document per line.

Hugging Face datasets reads the lines, from files, compressed files or the hub, and holds only a piece of them in
memory. Text that cannot be read stops the run, with file and line; nothing is left out silently.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import InputError

LONGEST_DOCUMENT = 1 << 20  # characters; the tokenizer needs about a hundred bytes for each
# What a compressed file begins with -> its kind; the suffixes of the kinds that can be read.
MAGIC = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4", b"PK\x03\x04": "zip", b"Rar!": "rar", b"7z\xbc\xaf\x27\x1c": "7z",
}  # fmt: skip
SUFFIXES = {"gzip": (".gz",), "bzip2": (".bz2",), "xz": (".xz",), "zstd": (".zst", ".zstd")}
PACKED = r"(\.gz|\.bz2|\.xz|\.zstd?)?"
TEXT = re.compile(r"(?!\.).*\.(txt|jsonl|json|ndjson)" + PACKED, re.IGNORECASE)  # a file's name
RECORDS = re.compile(r".*\.(jsonl|json|ndjson)" + PACKED, re.IGNORECASE)
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


def find_files(inputs: Iterable[str | Path]) -> list[Path]:
    """Return the files in `inputs`, and the text files of the folders in `inputs`, with part_2 before part_10.

    Other files of a folder are left out, and stderr says which; name them one by one to read them, too.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            every = sorted((file for file in path.rglob("*") if file.is_file()), key=_natural_order)
            in_folder = [file for file in every if TEXT.fullmatch(file.name)]
            if not in_folder:
                kinds = ".txt, .jsonl, .txt.gz, .jsonl.zst"
                raise InputError(f"{path}: expected text files ({kinds}) in this folder, got none; name another")
            if others := [str(file.relative_to(path)) for file in every if file not in in_folder]:
                more = f" and {len(others) - 5} more" if len(others) > 5 else ""
                print(f"note: {path}: not read: {', '.join(others[:5])}{more}", file=sys.stderr)
            files += in_folder
        elif path.exists():
            files.append(path)
        else:
            raise InputError(f"{path}: there is no such file or folder; check the path")
    return files


def _natural_order(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def hub_files(language: str) -> str:
    """Return where the hub has OSCAR 23.01. Raises InputError without a token: its terms must be accepted there."""
    from huggingface_hub import get_token

    if not get_token():
        raise InputError(
            "--hub: OSCAR 23.01 needs a Hugging Face token: accept its terms at huggingface.co/datasets/oscar-corpus/"
            "OSCAR-2301, then set HF_TOKEN or run `hf auth login`; or name local files with --input"
        )
    return HUB_FILES.format(language=language)


def read_documents(files: Iterable[str | Path]) -> Iterator[str]:
    """Yield the documents of the files, in order; empty ones (only white space) are left out.

    Plain text: every line is a document. Records (OSCAR 23.01): every line is a JSON object, and its "content" is the
    document; a file holds records if its first line is one, or if its name says so (.jsonl, .json, .ndjson). Both may
    be compressed (.gz, .bz2, .xz, .zst). A document of more than LONGEST_DOCUMENT characters is split into several.

    Raises InputError, with file and line, for a record that is not valid, and with the file for text that is not UTF-8,
    for another compression, and for a file that is damaged or incomplete.
    """
    for file in map(str, files):
        are_records: bool | None = True if RECORDS.fullmatch(file) else None  # None: the first line decides
        for number, line in enumerate(_lines(file), start=1):
            if are_records is None and line.strip():
                are_records = _is_record(line)
            yield from _split_long(_content(line, f"{file}, line {number}") if are_records else line)


def _is_record(line: str) -> bool:
    """Return whether a line is a record of OSCAR 23.01, or begins as one does."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line.lstrip().startswith('{"content":')
    return isinstance(record, dict) and "content" in record


def _check_compression(path: Path) -> None:
    """Raise InputError for a compression that cannot be read, and for one that the file's name does not say."""
    with open(path, "rb") as file:
        start = file.read(8)
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if kind and kind not in SUFFIXES:
        advice = f"unpack it, or compress it with one of {', '.join(SUFFIXES)}"
        raise InputError(f"{path}: expected text, got a file that is compressed with {kind}; {advice}")
    if kind and path.suffix.lower() not in SUFFIXES[kind]:
        advice = f"rename it to {path.name}{SUFFIXES[kind][0]}"
        raise InputError(f"{path}: expected text, got a file that is compressed with {kind}; {advice}")


def _lines(file: str) -> Iterator[str]:
    """Yield the lines of a file, or of all files that match a pattern on the hub."""
    from datasets import load_dataset  # here: it takes a second, and only the first run with a text needs it

    path = file if "://" in file else str(Path(file).absolute())
    if Path(path).is_file():
        _check_compression(Path(path))
    try:
        # As lines, not as JSON: a broken record is then named by its line. utf-8-sig: a byte order mark is no text.
        rows = load_dataset("text", data_files=path, split="train", streaming=True, encoding="utf-8-sig")
        for row in rows:
            yield row["text"]
    except Exception as error:  # whatever the file, the decompressor, the network or the hub may raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        advice = "check the file or download it again; text must be UTF-8"
        raise InputError(f"{file}: cannot be read to its end ({reason}); {advice}") from error


def _content(line: str, where: str) -> str:
    if not line.strip():
        return ""
    try:
        content = json.loads(line)["content"]
        content.encode()  # JSON can write half a surrogate pair, which is no character
        return content
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected one JSON object ({error}); repair or remove the line") from error
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            f'{where}: expected a JSON object whose "content" is text, got {line[:40]!r}; check that it is OSCAR 23.01'
        ) from None


def _split_long(document: str) -> Iterator[str]:
    while len(document) > LONGEST_DOCUMENT:
        cut = document.rfind(" ", 1, LONGEST_DOCUMENT)
        cut = LONGEST_DOCUMENT if cut == -1 else cut
        yield document[:cut]
        document = document[cut:]
    if document.strip():
        yield document
