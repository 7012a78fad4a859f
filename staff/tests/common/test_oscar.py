"""OSCAR text: what is a document, what cannot be read, what a folder of token blocks holds, and prepare_oscar.py."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import prepare_oscar
from common.data.oscar import read_blocks, read_manifest
from common.data.oscar_text import LONGEST_DOCUMENT, find_files, hub_files, parse_size, read_documents
from common.errors import InputError
from common.models.load import load_tokenizer, tokenizer_fingerprint

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
ONE = record("one").encode()
LINES = "".join(f"line {i}\n" for i in range(10_000)).encode()


@pytest.mark.parametrize(("name", "data", "documents"), [
    ("en.txt", "first\nsecond one\n", ["first", "second one"]),
    ("en.txt", b"first\r\nsecond\r\n", ["first", "second"]),
    ("en.txt", ODD + "\nnext", [ODD, "next"]),
    ("en.txt", "\n\r\n  \t\none\n\n", ["one"]),
    ("en.txt", b"\xef\xbb\xbfone\n", ["one"]),
    ("en.txt", b"", []),
    ("en.jsonl", record("first\nline two") + record("second"), ["first\nline two", "second"]),
    ("en.jsonl", record(ODD) + record("next").rstrip("\n"), [ODD, "next"]),
    ("en.jsonl", record("") + "\n" + record("one"), ["one"]),
    ("en.jsonl", b"\xef\xbb\xbf" + ONE, ["one"]),
    ("en.jsonl.zst", zstd.compress(ONE), ["one"]), ("en.jsonl.zstd", zstd.compress(ONE), ["one"]),
    ("en.jsonl.gz", gzip.compress(ONE), ["one"]), ("en.jsonl.xz", lzma.compress(ONE), ["one"]),
    ("en.jsonl.bz2", bz2.compress(ONE), ["one"]), ("en.txt.gz", gzip.compress(b"one\ntwo\n"), ["one", "two"]),
    ("en.txt.zst", FRAMES, ["one", "two"]),
    ("en.txt", record("one") + record("two"), ["one", "two"]), ("en", "\n" + record("one"), ["one"]),
    ("code.txt", '{"a": 1}\n{\n', ['{"a": 1}', "{"]), ("corpus.en", "one\n", ["one"]),
], ids=range(21))  # fmt: skip
def test_every_line_of_text_and_the_content_of_every_record_is_a_document(tmp_path, name, data, documents):
    assert read(tmp_path / name, data) == documents
    assert find_files([tmp_path / name]) == [tmp_path / name]


@pytest.mark.parametrize(("name", "data", "message"), [
    ("en.txt.zst", zstd.compress(LINES)[:500], "cannot be read to its end"),
    ("en.txt.gz", gzip.compress(LINES)[:500], "cannot be read to its end"),
    ("en.txt.gz", LINES, "cannot be read to its end"),
    ("en.txt", b"good\nab\xff\n", "cannot be read to its end .*0xff.*UTF-8"),
    ("en.txt", gzip.compress(b"one"), "compressed with gzip; rename it to en.txt.gz"),
    ("en.jsonl", lzma.compress(b"one"), "compressed with xz; rename it to en.jsonl.xz"),
    ("en.gz", zstd.compress(b"one"), "compressed with zstd; rename it"),
    ("en.zip", b"PK\x03\x04and more", "compressed with zip; unpack it"),
    ("en.jsonl.lz4", b"\x04\x22\x4d\x18and more", "compressed with lz4; unpack it"),
    *[("en.jsonl", f"{record('one')}\n{line}\n{record('two')}", f"line 3: .*{message}") for line, message in (
        ("{oops", "expected one JSON object"),
        (r'{"content": "half a pair: \ud800"}', "expected one JSON object"),
        ("[" * 9_999, "expected one JSON object"),
        ('{"id": 1, "text": "a"}', r'whose "content" is text, got .*"id": 1, "text"'),
        ('{"content": null}', 'whose "content" is text'),
        ("17", 'whose "content" is text'),
    )],
], ids=range(15))  # fmt: skip
def test_what_cannot_be_read_is_an_error_with_the_file_and_the_line_of_a_record(tmp_path, name, data, message):
    with pytest.raises(InputError, match=rf"{re.escape(name)}.*{message}") as error:
        read(tmp_path / name, data)

    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_a_long_document_comes_in_parts_that_together_are_the_document(tmp_path):
    text = "a few words of text " * (LONGEST_DOCUMENT // 10) + "x" * (LONGEST_DOCUMENT + 100)

    parts = read(tmp_path / "en.txt", text)

    assert "".join(parts) == text
    assert max(map(len, parts)) <= LONGEST_DOCUMENT
    assert parts[1].startswith(" ")  # cut before a space, where GPT-2 cuts too


def test_the_files_of_a_folder_come_in_the_order_of_their_numbers_and_others_are_named(tmp_path, capsys):
    for path, words in ((tmp_path / "nowhere", "there is no such file or folder"), (tmp_path, "expected text files")):
        with pytest.raises(InputError, match=words):
            find_files([path])
    names = ["en_part_1.jsonl", "en_part_2.jsonl.zst", "en_part_10.jsonl.xz", "sub/part_1.txt.gz"]
    (tmp_path / "sub").mkdir()
    for name in [*reversed(names), "README.md", ".hidden.txt"]:
        (tmp_path / name).touch()

    assert [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])] == names
    assert "not read: .hidden.txt, README.md" in capsys.readouterr().err


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


# --- token blocks ---

TEXTS = [f"Anna has found lamp {i} <|endoftext|>" * (1 + i % 4) for i in range(100)]  # the token's name is plain text


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny", "gpt2")


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """A folder with the texts; the cache is empty."""
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "part_1.txt").write_text("\r\n".join(TEXTS))
    return tmp_path / "text"


@pytest.fixture
def command(tmp_path, text, tokenizer):
    """Call prepare_oscar.py with the folder of text, a saved tokenizer and more words; return its output folder."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def run(*words: object) -> Path:
        flags = ["--input", text, "--output", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", *words]
        prepare_oscar.main([str(flag) for flag in flags])
        return tmp_path / "out"

    return run


def streams_of(documents: list[str], tokenizer) -> dict[str, list[int]]:
    """The ids of both splits: every 20th document is for validation, and each is followed by the end-of-text token."""
    streams: dict[str, list[int]] = {"train": [], "validation": []}
    for number, text in enumerate(documents, start=1):
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        streams["train" if number % 20 else "validation"] += [*ids, tokenizer.eos_token_id]
    return streams


def test_a_folder_has_the_tokenizer_s_ids_with_an_end_after_every_document_in_blocks_of_any_size(
    command, tokenizer, text
):
    long = ["word " * 150_000] * 3  # more characters than go to the tokenizer at once
    (text / "part_2.txt").write_text("\n".join(long))
    folder = command("--size", "all")

    expected = streams_of([*TEXTS, *long], tokenizer)
    for split, stream in expected.items():
        assert np.fromfile(folder / f"{split}.bin", "<i4").tolist() == stream
    manifest = read_manifest(folder)
    assert (manifest.documents, manifest.tokens) == (103, {split: len(stream) for split, stream in expected.items()})
    assert manifest.text_bytes == sum(len(one.encode()) for one in [*TEXTS, *long])
    for size in (8, 5):
        data = read_blocks(folder, tokenizer, size)
        assert (data.train[0].shape, data.train[0].dtype) == ((size,), torch.int64)
        blocks = expected["train"][: len(expected["train"]) // size * size]
        numbers = (data.train[i].tolist() for i in range(len(data.train)))
        assert list(itertools.chain.from_iterable(numbers)) == blocks
        assert len(data.validation) == len(expected["validation"]) // size
    with pytest.raises(InputError, match=r"train.bin: expected at least one block of 900000 tokens, got \d+ tokens"):
        read_blocks(folder, tokenizer, 900_000)


def test_the_limit_stops_before_the_document_that_would_exceed_it(command, text):
    (text / "part_1.txt").write_text("four\näöü\nmore")  # 4 + 6 + 4 bytes
    for size, documents, text_bytes in ((10, 2, 10), (9, 1, 4)):
        manifest = read_manifest(command("--size", size, "--overwrite"))
        assert (manifest.documents, manifest.text_bytes) == (documents, text_bytes)
    with pytest.raises(InputError, match=r"part_1.txt: expected at least one document with text"):
        command("--size", 3, "--overwrite")
    assert read_manifest(text.with_name("out")).documents == 1  # an error leaves the earlier folder as it was


def test_a_folder_is_used_with_its_own_tokenizer_only_and_only_whole(command, tokenizer, tmp_path):
    folder = command()
    saved = load_tokenizer(str(tmp_path / "tokenizer"), "gpt2")
    assert tokenizer_fingerprint(saved) == tokenizer_fingerprint(tokenizer)
    assert len(read_blocks(folder, saved, 8).train) > 0

    shutil.copytree(tmp_path / "tokenizer", tmp_path / "other")
    content = (
        (tmp_path / "other/tokenizer.json").read_text().replace('"add_prefix_space": false', '"add_prefix_space": true')
    )
    (tmp_path / "other/tokenizer.json").write_text(content)  # of equal size
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "other/tokenizer.json"))
    with pytest.raises(InputError, match=r"manifest.json: the text was tokenised with .*use the same one"):
        read_blocks(folder, other, 8)
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(InputError, match="expected a tokenizer with an end-of-text token"):
        read_blocks(tmp_path / "text", other, 8)

    command()
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 2)
    with pytest.raises(InputError, match=r"out: is no complete folder .*python prepare_oscar.py"):
        read_blocks(folder, tokenizer, 8)


def test_text_is_tokenised_into_the_cache_once_and_again_when_it_has_changed(text, tokenizer, capsys):
    first, second = (read_blocks(text, tokenizer, 8).train[0] for _ in range(2))
    assert torch.equal(first, second)
    assert capsys.readouterr().err.count(f"tokenised {text}: ") == 1

    (text / "part_1.txt").write_bytes((text / "part_1.txt").read_bytes().replace(b"Anna", b"Emma"))  # of equal size
    assert tokenizer.decode(read_blocks(text, tokenizer, 8).train[0]).startswith("Emma")


def test_the_command_replaces_only_a_folder_of_token_blocks_and_only_when_told_to(command, tmp_path, capsys):
    assert read_manifest(command("--size", "1KB")).text_bytes <= 1000
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: ")
    with pytest.raises(InputError, match="pass it as --data_dir, or replace it with --overwrite"):
        command()
    assert read_manifest(command("--overwrite")).text_bytes > 1000
    for name in ("thesis.txt", "manifest.json"):
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / name).write_text("years of work")
        (tmp_path / "out" / "notes").touch()
        with pytest.raises(InputError, match="got a path that holds no token blocks"):
            command("--overwrite")
        assert (tmp_path / "out" / name).read_text() == "years of work"
