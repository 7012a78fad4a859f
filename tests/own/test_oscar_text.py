"""Our own tests of common/data/oscar_text.py: what is a document, and what is said of text that cannot be read."""

import gzip
import json
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
    return json.dumps({"content": content, "warc_headers": {"warc-type": "conversion"}, "metadata": metadata}) + "\n"


def raw_record(content: str) -> str:
    return json.dumps({"content": content}, ensure_ascii=False) + "\n"


def read(path: Path, data: bytes | str) -> list[str]:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return list(read_documents([path]))


def test_every_line_of_plain_text_is_a_document(tmp_path):
    assert read(tmp_path / "en.txt", "first\nsecond one\n") == ["first", "second one"]


def test_every_record_gives_its_content(tmp_path):
    assert read(tmp_path / "en.jsonl", record("first\nline two") + record("second")) == ["first\nline two", "second"]


def test_the_two_characters_of_a_windows_line_end_go(tmp_path):
    assert read(tmp_path / "en.txt", b"first\r\nsecond\r\n") == ["first", "second"]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line(tmp_path, mark):
    text = f"before{mark}after"

    assert read(tmp_path / "en.txt", text + "\nnext\n") == [text, "next"]
    assert read(tmp_path / "en.jsonl", raw_record(text) + record("next")) == [text, "next"]


@pytest.mark.parametrize("name, line", [("en.txt", "last"), ("en.jsonl", record("last").rstrip("\n"))])
def test_the_last_line_needs_no_line_end(tmp_path, name, line):
    assert read(tmp_path / name, line) == ["last"]


@pytest.mark.parametrize(
    "name, text", [("en.txt", "\n\r\n  \t\none\n\n"), ("en.jsonl", record("") + "\n" + record("one"))]
)
def test_empty_documents_are_left_out(tmp_path, name, text):
    assert read(tmp_path / name, text) == ["one"]


def test_an_empty_file_has_no_documents(tmp_path):
    assert read(tmp_path / "en.txt", b"") == []


@pytest.mark.parametrize("name, line", [("en.txt", "one\n"), ("en.jsonl", record("one"))])
def test_a_byte_order_mark_is_no_text(tmp_path, name, line):
    assert read(tmp_path / name, b"\xef\xbb\xbf" + line.encode()) == ["one"]


@pytest.mark.parametrize("suffix, pack", [(".zst", zstd.compress), (".gz", gzip.compress)])
def test_packed_files_are_unpacked(tmp_path, suffix, pack):
    assert read(tmp_path / f"en.jsonl{suffix}", pack(record("one").encode())) == ["one"]
    assert read(tmp_path / f"en.txt{suffix}", pack(b"one\ntwo\n")) == ["one", "two"]


def test_a_zstd_file_may_have_several_frames(tmp_path):
    frames = [zstd.compress(part) for part in (b"one\nt", b"wo\n", b"three")]

    assert read(tmp_path / "en.txt.zst", b"".join(frames)) == ["one", "two", "three"]


@pytest.mark.parametrize("suffix, pack", [(".zst", zstd.compress), (".gz", gzip.compress)])
def test_a_packed_file_that_was_cut_off_is_an_error_with_its_name(tmp_path, suffix, pack):
    packed = pack("".join(f"line {i}\n" for i in range(10_000)).encode())

    with pytest.raises(InputError, match=rf"en.txt{suffix}: cannot be read to its end"):
        read(tmp_path / f"en.txt{suffix}", packed[: len(packed) // 2])


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_packed_file_that_is_none_is_an_error_with_its_name(tmp_path, suffix):
    with pytest.raises(InputError, match=rf"en.txt{suffix}: cannot be read to its end"):
        read(tmp_path / f"en.txt{suffix}", b"plain text\n" * 100)


def test_broken_utf8_is_an_error_with_the_file(tmp_path):
    with pytest.raises(InputError, match=r"en.txt: cannot be read to its end .*0xff.*UTF-8"):
        read(tmp_path / "en.txt", b"good\nab\xff\n")


@pytest.mark.parametrize(
    "line, message",
    [
        ("{oops", r"expected one JSON object"),
        ('{"content": "a"} {"content": "b"}', r"expected one JSON object"),
        (r'{"content": "half a pair: \ud800"}', r"expected one JSON object"),
        ("[" * 100_000, r"expected one JSON object"),
        ('{"id": 1, "text": "a"}', r'expected a record with "content", got id, text'),
        ("{}", r'expected a record with "content", got nothing'),
        ('{"content": null}', r'whose "content" is text'),
        ('["content"]', r'whose "content" is text'),
        ("17", r'whose "content" is text'),
    ],
)
def test_a_line_that_is_no_record_is_an_error_with_file_and_line(tmp_path, line, message):
    with pytest.raises(InputError, match=rf"en.jsonl, line 3: .*{message}") as caught:
        read(tmp_path / "en.jsonl", f"{record('one')}\n{line}\n{record('two')}")

    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_documents_before_a_broken_line_come_first(tmp_path):
    path = tmp_path / "en.jsonl"
    path.write_text(record("one") + "{oops\n")

    documents = read_documents([path])

    assert next(documents) == "one"


def test_a_long_document_comes_in_parts_that_together_are_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr(oscar_text, "LONGEST_DOCUMENT", 20)
    text = "a few words of text " * 10 + "andonewordthatislongerthanthelimit"

    parts = read(tmp_path / "en.txt", text)

    assert "".join(parts) == text
    assert max(map(len, parts)) <= 20
    assert all(part.startswith(" ") for part in parts[1:10])  # cut before a space, where GPT-2 cuts too


def test_the_files_of_a_folder_come_in_the_order_of_their_numbers(tmp_path):
    names = ["en_part_10.jsonl.zst", "en_part_2.jsonl.zst", "en_part_1.jsonl", "sub/part_1.txt.gz"]
    (tmp_path / "sub").mkdir()
    for name in [*names, "README.md", "checksum.sha256", ".hidden.txt"]:
        (tmp_path / name).touch()

    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])]

    assert found == ["en_part_1.jsonl", "en_part_2.jsonl.zst", "en_part_10.jsonl.zst", "sub/part_1.txt.gz"]


def test_files_that_are_named_are_taken_whatever_their_name(tmp_path):
    path = tmp_path / "corpus.en"
    path.write_text("one\n")

    assert list(read_documents(find_files([path]))) == ["one"]


def test_a_missing_file_and_a_folder_without_text_are_errors(tmp_path):
    with pytest.raises(InputError, match="nowhere: there is no such file or folder"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="expected text files"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    "text, size",
    [
        ("100MB", 100_000_000),
        ("100mb", 100_000_000),
        ("1.5 GB", 1_500_000_000),
        ("64KiB", 65536),
        ("2M", 2_000_000),
        ("250000", 250_000),
        ("7B", 7),
        ("all", None),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "0", "10 apples", "1e6", "5iB", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="expected a number of bytes such as 100MB"):
        parse_size(text)


def test_a_pattern_stands_for_all_files_of_the_hub(tmp_path):
    for number, text in enumerate(("a\u2028b", "c")):
        (tmp_path / f"en_meta_part_{number}.jsonl.zst").write_bytes(zstd.compress(raw_record(text).encode()))

    assert list(read_documents([f"{tmp_path}/*.jsonl.zst"])) == ["a\u2028b", "c"]


def test_without_a_token_the_hub_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)

    with pytest.raises(InputError, match=r"--hub: OSCAR 23.01 needs a Hugging Face token: .* --input"):
        hub_files("en")


def test_without_the_hub_the_error_names_what_could_not_be_read(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(InputError, match=r"hf://datasets/oscar-corpus/OSCAR-2301/en_meta.*: cannot be read"):
        next(read_documents([hub_files("en")]))
