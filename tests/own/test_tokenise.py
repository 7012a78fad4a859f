"""Our own tests of common/data/tokenise.py: what a folder of blocks holds, and which folder is kept or replaced."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.data import token_map, tokenise
from common.data.oscar import load_blocks
from common.errors import InputError
from common.paths import ROOT
from tests.own.small_token_blocks import TEXTS, WORDS, bpe, documents_of, make


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bpe(300)


def test_the_ids_are_the_tokenizers_own_with_end_of_text_after_every_document(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer, validation=0.0)

    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    assert documents_of(tmp_path / "out", "train") == expected


@pytest.mark.parametrize("characters", [1, 50, 1 << 20])
def test_the_size_of_batches_changes_nothing(tmp_path, tokenizer, monkeypatch, characters):
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", characters)

    make(tmp_path / "out", tokenizer)

    train, validation = (documents_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert [tokenizer.decode(ids[:-1]) for ids in validation] == TEXTS[9::10]
    assert [tokenizer.decode(ids[:-1]) for ids in train] == [text for i, text in enumerate(TEXTS) if i % 10 != 9]


def test_end_of_text_written_inside_a_document_is_text(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer, ["before<|endoftext|>after"], validation=0.0)

    (ids,) = documents_of(tmp_path / "out", "train")
    assert tokenizer.decode(ids[:-1]) == "before<|endoftext|>after"


def test_the_tokenizers_own_truncation_and_padding_do_not_count_and_are_kept(tmp_path, tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    try:
        make(tmp_path / "out", tokenizer, validation=0.0)
        kept = (tokenizer.backend_tokenizer.truncation["max_length"], tokenizer.backend_tokenizer.padding["length"])
    finally:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()

    assert kept == (3, 50)
    assert not tokenizer.backend_tokenizer.encode_special_tokens
    assert [tokenizer.decode(ids[:-1]) for ids in documents_of(tmp_path / "out", "train")] == TEXTS


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_take_two_bytes_where_the_vocabulary_allows(tmp_path, vocab_size, dtype):
    vocabulary = {f"w{i}": i for i in range(vocab_size - 1)} | {"<|endoftext|>": vocab_size - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    large = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")

    make(tmp_path / "out", large, [f"w0 w{vocab_size - 2}"], block_size=1, validation=0.0)

    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["dtype"] == dtype
    ids = torch.cat(list(load_blocks(tmp_path / "out", large).train))
    assert ids.tolist() == [0, vocab_size - 2, vocab_size - 1]


@pytest.mark.parametrize("fraction, held_out", [(0.0, 0), (0.05, 5), (0.25, 25), (1 / 3, 33), (0.999, 99)])
def test_the_validation_split_has_its_fraction_of_the_documents(tmp_path, tokenizer, fraction, held_out):
    manifest, _ = make(tmp_path / "out", tokenizer, validation=fraction)

    assert (manifest.train.documents, manifest.validation.documents) == (100 - held_out, held_out)


def test_equal_input_gives_equal_files(tmp_path, tokenizer):
    for name in ("a", "b"):
        make(tmp_path / name, tokenizer)

    for file in ("train.bin", "validation.bin", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_manifest_counts_what_was_read(tmp_path, tokenizer):
    manifest, is_new = make(tmp_path / "out", tokenizer, size=500)

    read = [text for i, text in enumerate(TEXTS) if len("".join(TEXTS[: i + 1])) <= 500]
    assert is_new
    assert (manifest.text_documents, manifest.text_bytes) == (len(read), len("".join(read)))
    assert manifest == token_map.read_manifest(tmp_path / "out")
    assert manifest.train.blocks == len(load_blocks(tmp_path / "out", tokenizer).train)


def test_text_without_a_document_is_an_error_that_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"texts: expected at least one document .* pass files that contain text"):
        make(tmp_path / "out", tokenizer, [])
    with pytest.raises(InputError, match="within 3 bytes; use a larger --size"):
        make(tmp_path / "out", tokenizer, size=3)

    assert not [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize("options", [{"block_size": 0}, {"validation": 1.0}, {"validation": -0.1}], ids=str)
def test_options_out_of_range_are_refused(tmp_path, tokenizer, options):
    with pytest.raises(InputError, match=f"--{next(iter(options))}: expected"):
        make(tmp_path / "out", tokenizer, **options)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path, tokenizer):
    nameless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)

    with pytest.raises(InputError, match="expected a tokenizer with an end-of-text token"):
        make(tmp_path / "out", nameless)


def test_a_finished_folder_of_the_same_input_is_kept(tmp_path, tokenizer):
    first, _ = make(tmp_path / "out", tokenizer)

    second, is_new = make(tmp_path / "out", tokenizer, texts=iter(()))  # nothing to read: it must not be read

    assert (second, is_new) == (first, False)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"block_size": 4}, "block_size"),
        ({"validation": 0.2}, "validation_fraction"),
        ({"size": 50}, "size_limit"),
        ({"sources": [{"name": "texts", "bytes": 3}]}, "sources"),
    ],
    ids=str,
)
def test_a_folder_of_other_input_is_refused_unless_overwritten(tmp_path, tokenizer, change, named):
    make(tmp_path / "out", tokenizer)

    with pytest.raises(InputError, match=rf"out: was made with different {named} .* --overwrite"):
        make(tmp_path / "out", tokenizer, **change)
    _, is_new = make(tmp_path / "out", tokenizer, **change, overwrite=True)

    assert is_new
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial.lock", "out"]


def test_a_damaged_folder_is_not_kept(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)
    os.truncate(tmp_path / "out" / "train.bin", 10)

    with pytest.raises(InputError, match=r"train.bin: expected \d+ bytes"):
        make(tmp_path / "out", tokenizer)
    make(tmp_path / "out", tokenizer, overwrite=True)

    assert len(load_blocks(tmp_path / "out", tokenizer).train)


@pytest.mark.parametrize("file", ["thesis.txt", "manifest.json/index.html"])
def test_other_peoples_files_are_never_replaced(tmp_path, tokenizer, file):
    path = tmp_path / "out" / file
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    (tmp_path / "out" / "notes").touch()

    with pytest.raises(InputError, match="got a path that holds no token blocks"):
        make(tmp_path / "out", tokenizer, overwrite=True)

    assert path.read_text() == "years of work"


def test_an_empty_folder_is_used(tmp_path, tokenizer):
    (tmp_path / "out").mkdir()

    _, is_new = make(tmp_path / "out", tokenizer)

    assert is_new


def test_an_error_half_way_leaves_the_earlier_folder_as_it_was(tmp_path, tokenizer):
    def broken():
        yield from TEXTS
        raise InputError("line 101 is broken")

    earlier, _ = make(tmp_path / "out", tokenizer)

    with pytest.raises(InputError, match="line 101"):
        make(tmp_path / "out", tokenizer, broken(), block_size=4, overwrite=True)

    assert token_map.read_manifest(tmp_path / "out") == earlier
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial.lock", "out"]


def test_a_kill_half_way_leaves_no_folder_and_the_next_run_makes_it(tmp_path, tokenizer):
    fork = multiprocessing.get_context("fork")
    half_way, never = fork.Event(), fork.Event()

    def stuck():
        yield from TEXTS[:50]
        half_way.set()
        never.wait()

    killed = fork.Process(target=make, args=(tmp_path / "out", tokenizer, stuck()))
    killed.start()
    assert half_way.wait(timeout=60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()

    assert (tmp_path / ".out.partial").exists()
    assert not (tmp_path / "out").exists()
    make(tmp_path / "out", tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial.lock", "out"]


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path, tokenizer):
    (tmp_path / "file").touch()

    with pytest.raises(InputError, match="cannot be written"):
        make(tmp_path / "file" / "out", tokenizer)


MEASURE = """
import resource, sys
from common.data.oscar_text import read_documents
from common.data.tokenise import tokenise
from pathlib import Path
from tests.own.small_token_blocks import bpe
tokenizer = bpe(300)
for path in map(Path, sys.argv[1:]):
    tokenise(read_documents([path]), [], tokenizer, path.with_suffix(""), size=None, block_size=8, validation=0.05)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    files = []
    for megabytes in (6, 30):
        files.append(tmp_path / f"{megabytes}.txt")
        with open(files[-1], "w") as file:
            for i in range(megabytes * 20_000):  # lines of 50 bytes
                file.write(f"{i:09d} {' '.join(WORDS)[:39]}\n")

    run = [sys.executable, "-c", MEASURE, *map(str, files)]
    output = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    small, large = map(int, output.split())  # the most so far, in KiB
    assert large - small < 12 * 1024  # 24 MB more text are 20 MB more of ids
