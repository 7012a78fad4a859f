"""Our own tests of common/data/oscar.py: what a folder holds, damaged ones, and the command."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import prepare_oscar
from common.cache import cached
from common.data import oscar
from common.data.oscar import DTYPE, Manifest, read_blocks, read_manifest, write_folder
from common.errors import InputError
from common.models.load import tokenizer_fingerprint

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


def make(folder: Path, tokenizer, texts=TEXTS, size=None) -> Manifest:
    """The manifest of `folder`, made from `texts`, one a line."""
    file = folder.with_name("texts.txt")
    file.write_text("\n".join(texts))
    return read_manifest(cached(folder, lambda partial: write_folder(partial, [file], tokenizer, size), fresh=True))


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document in a .bin file, read with nothing but numpy."""
    ids = np.fromfile(folder / f"{split}.bin", DTYPE).tolist()
    ends = [place + 1 for place, token in enumerate(ids) if token == END_OF_TEXT]
    assert ends[-1] == len(ids)
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

    for size in (8, 5):
        data = read_blocks(tmp_path / "out", tokenizer, size)
        assert (data.train[0].shape, data.train[0].dtype) == ((size,), torch.int64)
        assert torch.cat(list(data.train)).tolist() == ids[: len(ids) // size * size]
        assert len(data.validation) > 0
    with pytest.raises(InputError, match=r"train.bin: expected at least one block of 100000 tokens, got \d+ tokens"):
        read_blocks(tmp_path / "out", tokenizer, 100_000)
    make(tmp_path / "out", tokenizer, TEXTS[:10])
    assert len(read_blocks(tmp_path / "out", tokenizer, 8).validation) == 0


@pytest.mark.parametrize("characters", [1, 50, 1 << 20])
def test_the_ids_are_the_tokenizers_own_with_end_of_text_after_every_document(tmp_path, monkeypatch, characters):
    monkeypatch.setattr(oscar, "BATCH_CHARACTERS", characters)  # the size of batches changes nothing
    texts = [*TEXTS, "end of text<|endoftext|>written inside a document is text"]
    tokenizer = bpe(300)
    expected = [[*tokenizer(text, split_special_tokens=True)["input_ids"], tokenizer.eos_token_id] for text in texts]
    tokenizer.backend_tokenizer.enable_truncation(3)  # its own truncation and padding do not count
    tokenizer.backend_tokenizer.enable_padding(length=50)

    make(tmp_path / "out", tokenizer, texts)

    assert documents_of(tmp_path / "out", "validation") == expected[19::20]
    assert documents_of(tmp_path / "out", "train") == [ids for i, ids in enumerate(expected) if i % 20 != 19]


def test_the_limit_stops_before_the_document_that_would_exceed_it(tmp_path, tokenizer):
    for size, documents, text_bytes in ((10, 2, 10), (9, 1, 4)):
        manifest = make(tmp_path / "out", tokenizer, ["four", "äöü", "more"], size)  # 4 + 6 + 4 bytes
        assert (manifest.documents, manifest.text_bytes) == (documents, text_bytes)

    with pytest.raises(InputError, match=r"texts.txt: expected at least one document with text"):
        make(tmp_path / "none", tokenizer, ["four"], size=3)
    assert not (tmp_path / "none").exists()


def test_a_tokenizer_that_has_no_end_of_text_is_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match="expected a tokenizer with an end-of-text token"):
        make(tmp_path / "out", PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer))


def truncate(folder: Path) -> None:
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 2)


def test_a_damaged_folder_is_an_error_that_names_file_and_remedy(tmp_path, tokenizer):
    def build(partial: Path) -> None:
        (partial / "manifest.json").write_text('{"fingerprint": "", "more": 1}')

    make(tmp_path / "damaged", tokenizer)
    truncate(tmp_path / "damaged")
    with pytest.raises(InputError, match=r"damaged: .*train.bin has changed.*python prepare_oscar.py"):
        read_blocks(tmp_path / "damaged", tokenizer, 8)
    with pytest.raises(InputError, match=r"manifest.json: cannot be read .*python prepare_oscar.py"):
        read_blocks(cached(tmp_path / "out", build), tokenizer, 8)


def test_another_tokenizer_is_an_error_and_a_saved_one_is_the_same(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert tokenizer_fingerprint(saved) == tokenizer_fingerprint(tokenizer)
    serialised = tokenizer.backend_tokenizer.to_str()
    for change in (('"<|endoftext|>"', '"<|end|>"'), ('prefix_space":false', 'prefix_space":true')):  # of equal size
        other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(serialised.replace(*change)))
        assert len(other) == len(tokenizer)
        assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)

    with pytest.raises(InputError, match=r"manifest.json: the text was tokenised with .*use the same one"):
        read_blocks(tmp_path / "out", bpe(280), 8)


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
    first, second = (read_blocks(text, tokenizer, 8).train[0] for _ in range(2))
    assert torch.equal(first, second) and len(folders()) == 1
    assert capsys.readouterr().err.count("tokenised") == 1

    truncate(folders()[0])
    assert torch.equal(read_blocks(text, tokenizer, 8).train[0], first)

    changed = (text / "part_1.txt").read_bytes().replace(b"the", b"THE")  # of equal size
    (text / "part_1.txt").write_bytes(changed)
    assert tokenizer.decode(read_blocks(text, tokenizer, 8).train[0]).startswith("THE")
    assert len(folders()) == 2


@pytest.fixture
def command(tmp_path, tokenizer):
    """Call prepare_oscar.py with a folder of text, a saved tokenizer and more words."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = text_folder(tmp_path / "text")

    def run(*words: str) -> None:
        flags = ["--input", text, "--output", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", *words]
        prepare_oscar.main([str(flag) for flag in flags])

    return run


def test_the_command_makes_a_folder_and_replaces_it_only_when_told_to(tmp_path, tokenizer, command, capsys):
    command("--size", "1KB")

    assert len(read_blocks(tmp_path / "out", tokenizer, 16).train) > 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: ")
    assert 500 < read_manifest(tmp_path / "out").text_bytes <= 1000
    with pytest.raises(InputError, match="pass it as --data_dir, or replace it with --overwrite"):
        command()
    command("--overwrite")
    assert read_manifest(tmp_path / "out").text_bytes > 1000


def test_the_command_refuses_a_size_that_is_none_or_too_small_and_a_wrong_set_of_flags(command):
    with pytest.raises(InputError, match="--size"):
        command("--size", "1B")
    with pytest.raises(InputError, match="expected a number of bytes"):
        command("--size", "nonsense")
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
