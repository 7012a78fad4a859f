"""Our own tests of common/data/oscar.py and token_folder.py: what a folder holds, damaged ones, and the command."""

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import prepare_oscar
from common.cache import cached
from common.data import token_folder
from common.data.oscar import load_blocks
from common.data.token_folder import Manifest, fingerprint, make_request, read_manifest, write_folder
from common.errors import InputError

WORDS = ["the", "gradients", "of", "four", "workers", "are", "averaged", "before", "every", "step"]
END_OF_TEXT = 0
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 2 + i % 5]) + f" {i}." for i in range(100)]


def bpe(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's, small."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def make(folder: Path, tokenizer, texts=TEXTS, size=None, validation=0.1) -> Manifest:
    """The manifest of `folder`, made from `texts` with small blocks."""
    request = make_request([{"name": "texts"}], tokenizer, size, block_size=8, validation=validation)
    return read_manifest(cached(folder, lambda partial: write_folder(partial, texts, tokenizer, request), fresh=True))


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document in a .bin file, read with nothing but numpy."""
    manifest = json.loads((folder / "manifest.json").read_text())
    ids = np.fromfile(folder / f"{split}.bin", manifest["dtype"]).tolist()
    ends = [place + 1 for place, token in enumerate(ids) if token == END_OF_TEXT]
    assert [*ends, 0][-1 if not ids else -2] == len(ids)
    return [ids[first:end] for first, end in itertools.pairwise([0, *ends])]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bpe(300)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_items_are_consecutive_blocks_of_int64_ids_of_any_size(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)
    ids = [token for document in documents_of(tmp_path / "out", "train") for token in document]

    data, by_five = load_blocks(tmp_path / "out", tokenizer), load_blocks(tmp_path / "out", tokenizer, 5)

    assert (data.block_size, data.vocab_size) == (8, 300)
    assert (data.train[0].shape, data.train[0].dtype) == ((8,), torch.int64)
    assert torch.cat(list(data.train)).tolist() == ids[: len(ids) // 8 * 8]
    assert torch.cat(list(by_five.train)).tolist() == ids[: len(ids) // 5 * 5]
    assert len(data.validation) > 0
    with pytest.raises(InputError, match=r"train.bin: expected at least one block of 100000 tokens, got \d+ tokens"):
        load_blocks(tmp_path / "out", tokenizer, 100_000)
    make(tmp_path / "out", tokenizer, validation=0.0)
    assert len(load_blocks(tmp_path / "out", tokenizer).validation) == 0


def test_the_ids_are_the_tokenizers_own_with_end_of_text_after_every_document(tmp_path):
    tokenizer = bpe(300)
    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    tokenizer.backend_tokenizer.enable_truncation(3)  # its own truncation and padding do not count
    tokenizer.backend_tokenizer.enable_padding(length=50)

    make(tmp_path / "out", tokenizer, validation=0.0)

    assert documents_of(tmp_path / "out", "train") == expected


@pytest.mark.parametrize("characters", [1, 50, 1 << 20])
def test_the_size_of_batches_changes_nothing(tmp_path, tokenizer, monkeypatch, characters):
    monkeypatch.setattr(token_folder, "BATCH_CHARACTERS", characters)
    texts = [*TEXTS, "end of text<|endoftext|>written inside a document is text"]

    make(tmp_path / "out", tokenizer, texts)

    train, validation = (documents_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert [tokenizer.decode(ids[:-1]) for ids in validation] == texts[9::10]
    assert [tokenizer.decode(ids[:-1]) for ids in train] == [text for i, text in enumerate(texts) if i % 10 != 9]


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_take_two_bytes_where_the_vocabulary_allows(tmp_path, vocab_size, dtype):
    vocabulary = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")

    manifest = make(tmp_path / "out", tokenizer, [f"w{vocab_size - 1}"], validation=0.0)

    assert manifest.dtype == dtype
    assert documents_of(tmp_path / "out", "train") == [[vocab_size - 1, 0]]


def test_the_limit_stops_before_the_document_that_would_exceed_it(tmp_path, tokenizer):
    for size, documents, text_bytes in ((10, 2, 10), (9, 1, 4)):
        manifest = make(tmp_path / "out", tokenizer, ["four", "äöü", "more"], size, 0.0)  # 4 + 6 + 4 bytes
        assert (manifest.documents, manifest.text_bytes) == (documents, text_bytes)

    with pytest.raises(InputError, match="texts: expected at least one document with text"):
        make(tmp_path / "none", tokenizer, ["four"], size=3)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("options", [{"block_size": 0}, {"validation": 1.0}, {"validation": -0.1}])
def test_options_out_of_range_are_refused(tokenizer, options):
    with pytest.raises(InputError, match=f"--{next(iter(options))}: expected"):
        token_folder.make_request([], tokenizer, **{"size": None, "block_size": 8, "validation": 0.1} | options)


def test_a_tokenizer_that_is_slow_or_has_no_end_of_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected a tokenizer with an end-of-text token"):
        make(tmp_path / "out", PreTrainedTokenizerFast(tokenizer_object=bpe(300).backend_tokenizer))
    with pytest.raises(InputError, match="expected a fast tokenizer"):
        fingerprint(SimpleNamespace(name_or_path="slow"))


def truncate_the_map(folder: Path) -> None:
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 2)


def test_a_damaged_folder_is_an_error_that_names_file_and_remedy(tmp_path, tokenizer):
    def build(partial: Path) -> None:
        (partial / "manifest.json").write_text('{"request": {}, "more": 1}')

    make(tmp_path / "damaged", tokenizer)
    truncate_the_map(tmp_path / "damaged")
    with pytest.raises(InputError, match=r"damaged: .*train.bin has changed.*python prepare_oscar.py"):
        load_blocks(tmp_path / "damaged", tokenizer)
    with pytest.raises(InputError, match=r"manifest.json: cannot be read .*python prepare_oscar.py"):
        load_blocks(cached(tmp_path / "out", build), tokenizer)


def test_another_tokenizer_is_an_error_that_names_both_and_a_saved_one_is_the_same(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")) == fingerprint(tokenizer)
    serialised = tokenizer.backend_tokenizer.to_str()
    for change in (('"<|endoftext|>"', '"<|end|>"'), ('prefix_space":false', 'prefix_space":true')):  # of equal size
        other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(serialised.replace(*change)))
        assert len(other) == len(tokenizer) and fingerprint(other) != fingerprint(tokenizer)

    with pytest.raises(InputError, match=r"manifest.json: .*\(300 tokens\).*the same tokenizer"):
        load_blocks(tmp_path / "out", bpe(280))


def text_folder(path: Path) -> Path:
    path.mkdir()
    (path / "part_1.txt").write_text("\r\n".join(TEXTS))
    return path


def test_a_folder_of_text_is_tokenised_once_and_again_when_it_or_the_cache_has_changed(
    tmp_path, tokenizer, own_cache, capsys
):
    def folders():
        return [path for path in (own_cache / "oscar").iterdir() if path.is_dir()]

    text = text_folder(tmp_path / "text")
    first, second = (load_blocks(text, tokenizer, 8).train[0] for _ in range(2))
    assert torch.equal(first, second) and len(folders()) == 1
    assert capsys.readouterr().err.count("tokenised") == 1

    truncate_the_map(folders()[0])
    assert torch.equal(load_blocks(text, tokenizer, 8).train[0], first)

    changed = (text / "part_1.txt").read_bytes().replace(b"the", b"THE")  # of equal size
    (text / "part_1.txt").write_bytes(changed)
    assert tokenizer.decode(load_blocks(text, tokenizer, 8).train[0]).startswith("THE")
    assert len(folders()) == 2


@pytest.fixture
def command(tmp_path, tokenizer):
    """Call prepare_oscar.py with a folder of text, a saved tokenizer and more words; OUT is the folder to make."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = text_folder(tmp_path / "text")

    def run(*words: object, out: Path = tmp_path / "out") -> None:
        flags = ["--input", text, "--output", out, "--tokenizer", tmp_path / "tokenizer", *words]
        prepare_oscar.main([str(flag) for flag in flags])

    return run


def test_the_command_makes_a_folder_once_and_replaces_it_only_when_told_to(tmp_path, tokenizer, command, capsys):
    for _ in range(2):
        command("--size", "1KB", "--block_size", 16, "--validation", 0.2)

    data = load_blocks(tmp_path / "out", tokenizer)
    assert (data.block_size, len(data.train) > 0, len(data.validation) > 0) == (16, True, True)
    first, second = capsys.readouterr().out.splitlines()
    assert first in second
    assert second.endswith("(made earlier from the same input)")
    assert read_manifest(tmp_path / "out").text_bytes <= 1000

    with pytest.raises(InputError, match="--overwrite"):
        command("--block_size", 8)
    command("--block_size", 8, "--overwrite")
    assert read_manifest(tmp_path / "out").request.block_size == 8


def test_the_command_refuses_a_size_that_is_none_or_too_small_and_a_place_that_cannot_be(tmp_path, command):
    (tmp_path / "file").touch()

    with pytest.raises(InputError, match="--size"):
        command("--size", "1B")
    with pytest.raises(InputError, match="expected a number of bytes"):
        command("--size", "nonsense")
    with pytest.raises(InputError, match="cannot be written"):
        command(out=tmp_path / "file" / "out")
    for arguments in ("--output out", "--input a --hub en --output out", "--input a"):
        with pytest.raises(SystemExit, match="2"):
            prepare_oscar.main(arguments.split())


@pytest.mark.parametrize("file", ["thesis.txt", "manifest.json"])
def test_other_peoples_files_are_never_replaced(tmp_path, command, file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).write_text("years of work")
    (tmp_path / "out" / "notes").touch()

    with pytest.raises(InputError, match="got a path that holds no token blocks"):
        command("--overwrite")

    assert (tmp_path / "out" / file).read_text() == "years of work"


def test_an_error_half_way_leaves_the_earlier_folder_as_it_was(tmp_path, tokenizer, command):
    earlier = make(tmp_path / "out", tokenizer)
    (tmp_path / "text" / "part_2.jsonl").write_text('{"content": "a"}\n{oops\n')

    with pytest.raises(InputError, match="line 2"):
        command("--overwrite")

    assert read_manifest(tmp_path / "out") == earlier
