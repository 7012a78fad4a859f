"""Our own tests of common/data/oscar_text.py: what is a document, and what is said of text that cannot be read."""

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest

from common.data import oscar_text
from common.data.oscar_text import find_files, hub_files, parse_size, read_documents
from common.errors import InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def record(content: str) -> str:
    """One line of OSCAR 23.01, as the corpus writes it: characters above ASCII stay as they are."""
    metadata = {"identification": {"label": "en", "prob": 0.9}, "harmful_pp": None, "quality_warnings": None}
    fields = {"content": content, "warc_headers": {"warc-type": "conversion"}, "metadata": metadata}
    return json.dumps(fields, ensure_ascii=False) + "\n"


def read(path: Path, data: bytes | str) -> list[str]:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return list(read_documents([path]))


ODD = "before\u2028a\u2029b\u0085c\x0bd\x0ce\x1cafter"  # only a line feed ends a line
FRAMES = b"".join(zstd.compress(part) for part in (b"one\nt", b"wo\n"))


@pytest.mark.parametrize(
    "name, data, documents",
    [
        ("en.txt", "first\nsecond one\n", ["first", "second one"]),
        ("en.txt", b"first\r\nsecond\r\n", ["first", "second"]),
        ("en.txt", ODD + "\nnext", [ODD, "next"]),
        ("en.txt", "\n\r\n  \t\none\n\n", ["one"]),
        ("en.txt", b"\xef\xbb\xbfone\n", ["one"]),
        ("en.txt", b"", []),
        ("en.jsonl", record("first\nline two") + record("second"), ["first\nline two", "second"]),
        ("en.jsonl", record(ODD) + record("next").rstrip("\n"), [ODD, "next"]),
        ("en.jsonl", record("") + "\n" + record("one"), ["one"]),
        ("en.jsonl", b"\xef\xbb\xbf" + record("one").encode(), ["one"]),
        ("en.jsonl.zst", zstd.compress(record("one").encode()), ["one"]),
        ("en.jsonl.gz", gzip.compress(record("one").encode()), ["one"]),
        ("en.txt.gz", gzip.compress(b"one\ntwo\n"), ["one", "two"]),
        ("en.jsonl.xz", lzma.compress(record("one").encode()), ["one"]),
        ("en.jsonl.bz2", bz2.compress(record("one").encode()), ["one"]),
        ("en.jsonl.zstd", zstd.compress(record("one").encode()), ["one"]),
        ("en.txt", record("one") + record("two"), ["one", "two"]),
        ("en", "\n" + record("one"), ["one"]),
        ("code.txt", '{"a": 1}\n{\n', ['{"a": 1}', "{"]),
        ("en.txt.zst", FRAMES, ["one", "two"]),
        ("corpus.en", "one\n", ["one"]),
    ],
    ids=range(21),
)
def test_every_line_of_text_and_the_content_of_every_record_is_a_document(tmp_path, name, data, documents):
    assert read(tmp_path / name, data) == documents
    assert find_files([tmp_path / name]) == [tmp_path / name]


PACKED = {".zst": zstd.compress, ".gz": gzip.compress}


@pytest.mark.parametrize("suffix", PACKED)
def test_a_packed_file_that_was_cut_off_or_is_none_is_an_error_with_its_name(tmp_path, suffix):
    packed = PACKED[suffix]("".join(f"line {i}\n" for i in range(10_000)).encode())

    for data in (packed[: len(packed) // 2], b"plain text\n" * 100):
        with pytest.raises(InputError, match=rf"en.txt{suffix}: cannot be read to its end"):
            read(tmp_path / f"en.txt{suffix}", data)


OTHER = {
    "en.txt": (gzip.compress(b"one"), "compressed with gzip; rename it to en.txt.gz"),
    "en.jsonl": (lzma.compress(b"one"), "compressed with xz; rename it to en.jsonl.xz"),
    "en.gz": (zstd.compress(b"one"), "compressed with zstd; rename it"),
    "en.zip": (b"PK\x03\x04and more", "compressed with zip; unpack it"),
    "en.jsonl.lz4": (b"\x04\x22\x4d\x18and more", "compressed with lz4; unpack it"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_compression_is_refused_by_name(tmp_path, name):
    data, message = OTHER[name]

    with pytest.raises(InputError, match=rf"{name}: .*{message}"):
        read(tmp_path / name, data)


def test_a_folder_is_read_whole_and_what_is_no_text_is_said(tmp_path, capsys):
    for name in ("part_10.jsonl.xz", "part_2.jsonl.zst", "notes.txt", "picture.png"):
        (tmp_path / name).write_bytes(b"")

    files = find_files([tmp_path])

    assert [file.name for file in files] == ["notes.txt", "part_2.jsonl.zst", "part_10.jsonl.xz"]
    assert "not read: picture.png" in capsys.readouterr().err


def test_broken_utf8_is_an_error_with_the_file(tmp_path):
    with pytest.raises(InputError, match=r"en.txt: cannot be read to its end .*0xff.*UTF-8"):
        read(tmp_path / "en.txt", b"good\nab\xff\n")


@pytest.mark.parametrize(
    "line, message",
    [
        ("{oops", r"expected one JSON object"),
        (r'{"content": "half a pair: \ud800"}', r"expected one JSON object"),
        ("[" * 100_000, r"expected one JSON object"),
        ('{"id": 1, "text": "a"}', r'whose "content" is text, got .*"id": 1, "text"'),
        ('{"content": null}', r'whose "content" is text'),
        ("17", r'whose "content" is text'),
    ],
    ids=range(6),
)
def test_a_line_that_is_no_record_is_an_error_with_file_and_line_after_the_documents_before_it(tmp_path, line, message):
    path = tmp_path / "en.jsonl"
    path.write_text(f"{record('one')}\n{line}\n{record('two')}")
    documents = read_documents([path])
    assert next(documents) == "one"

    with pytest.raises(InputError, match=rf"en.jsonl, line 3: .*{message}") as caught:
        next(documents)

    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_a_long_document_comes_in_parts_that_together_are_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr(oscar_text, "LONGEST_DOCUMENT", 20)
    text = "a few words of text " * 10 + "andonewordthatislongerthanthelimit"

    parts = read(tmp_path / "en.txt", text)

    assert "".join(parts) == text
    assert max(map(len, parts)) <= 20
    assert all(part.startswith(" ") for part in parts[1:10])  # cut before a space, where GPT-2 cuts too


def test_the_files_of_a_folder_come_in_the_order_of_their_numbers(tmp_path):
    with pytest.raises(InputError, match="nowhere: there is no such file or folder"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="expected text files"):
        find_files([tmp_path])
    names = ["en_part_10.jsonl.zst", "en_part_2.jsonl.zst", "en_part_1.jsonl", "sub/part_1.txt.gz"]
    (tmp_path / "sub").mkdir()
    for name in [*names, "README.md", "checksum.sha256", ".hidden.txt"]:
        (tmp_path / name).touch()

    paths = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])]

    assert paths == ["en_part_1.jsonl", "en_part_2.jsonl.zst", "en_part_10.jsonl.zst", "sub/part_1.txt.gz"]


def test_sizes_are_read_with_their_units():
    sizes = {"100MB": 100_000_000, "100mb": 100_000_000, "1.5 GB": 1_500_000_000, "64KiB": 65536, "250000": 250_000}
    assert {text: parse_size(text) for text in (*sizes, "7B", "all")} == {**sizes, "7B": 7, "all": None}
    for text in ("", "MB", "-1MB", "0", "10 apples", "1e6", "5iB", "nan"):
        with pytest.raises(InputError, match="expected a number of bytes such as 100MB"):
            parse_size(text)


def test_a_pattern_stands_for_all_files_of_the_hub_and_an_error_says_what_it_needs(tmp_path, monkeypatch):
    for number, text in enumerate(("a\u2028b", "c")):
        (tmp_path / f"en_meta_part_{number}.jsonl.zst").write_bytes(zstd.compress(record(text).encode()))
    assert list(read_documents([f"{tmp_path}/*.jsonl.zst"])) == ["a\u2028b", "c"]

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    with pytest.raises(InputError, match=r"hf://datasets/oscar-corpus/OSCAR-2301/en_meta.*: cannot be read"):
        next(read_documents([hub_files("en")]))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(InputError, match=r"--hub: OSCAR 23.01 needs a Hugging Face token: .* --input"):
        hub_files("en")
