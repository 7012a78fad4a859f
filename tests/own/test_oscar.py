"""Our own tests of common/data/oscar.py and token_folder.py: what a folder holds, damaged ones, and the command."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

import prepare_oscar
from common import cache
from common.data import token_folder
from common.data.oscar import load_blocks
from common.data.token_folder import fingerprint, read_manifest
from common.errors import InputError
from common.paths import ROOT, locked
from tests.own.small_token_blocks import TEXTS, bpe, documents_of, make


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bpe(300)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_items_are_consecutive_blocks_of_int64_ids(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)
    ids = [token for document in documents_of(tmp_path / "out", "train") for token in document]

    data = load_blocks(tmp_path / "out", tokenizer)

    assert (data.block_size, data.vocab_size) == (8, 300)
    assert (data.train[0].shape, data.train[0].dtype) == ((8,), torch.int64)
    assert torch.cat(list(data.train)).tolist() == ids[: len(ids) // 8 * 8]
    assert len(data.validation) > 0


def test_a_loader_stacks_the_blocks(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)

    batch = next(iter(DataLoader(load_blocks(tmp_path / "out", tokenizer).train, batch_size=3)))

    assert batch.shape == (3, 8)


def test_one_folder_serves_any_block_size(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)
    by_eight, by_five = (load_blocks(tmp_path / "out", tokenizer, size).train for size in (8, 5))

    assert torch.cat(list(by_eight))[:100].tolist() == torch.cat(list(by_five))[:100].tolist()
    assert by_five[0].shape == (5,)


def test_blocks_longer_than_the_text_are_an_error(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)

    with pytest.raises(InputError, match=r"train.bin: expected at least one block of 100000 tokens, got \d+ tokens"):
        load_blocks(tmp_path / "out", tokenizer, 100_000)


def test_a_split_without_documents_is_empty(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer, validation=0.0)

    assert len(load_blocks(tmp_path / "out", tokenizer).validation) == 0


def test_the_ids_are_the_tokenizers_own_with_end_of_text_after_every_document(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer, validation=0.0)

    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    assert documents_of(tmp_path / "out", "train") == expected


@pytest.mark.parametrize("characters", [1, 50, 1 << 20])
def test_the_size_of_batches_changes_nothing(tmp_path, tokenizer, monkeypatch, characters):
    monkeypatch.setattr(token_folder, "BATCH_CHARACTERS", characters)

    make(tmp_path / "out", tokenizer)

    train, validation = (documents_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert [tokenizer.decode(ids[:-1]) for ids in validation] == TEXTS[9::10]
    assert [tokenizer.decode(ids[:-1]) for ids in train] == [text for i, text in enumerate(TEXTS) if i % 10 != 9]


def test_end_of_text_written_inside_a_document_is_text(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer, ["before<|endoftext|>after"], validation=0.0)

    (ids,) = documents_of(tmp_path / "out", "train")
    assert tokenizer.decode(ids[:-1]) == "before<|endoftext|>after"


def test_the_tokenizers_own_truncation_and_padding_do_not_count(tmp_path):
    tokenizer = bpe(300)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)

    make(tmp_path / "out", tokenizer, validation=0.0)

    assert [tokenizer.decode(ids[:-1]) for ids in documents_of(tmp_path / "out", "train")] == TEXTS


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_take_two_bytes_where_the_vocabulary_allows(tmp_path, vocab_size, dtype):
    vocabulary = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")

    manifest = make(tmp_path / "out", tokenizer, [f"w{vocab_size - 1}"], validation=0.0)

    assert manifest.dtype == dtype
    assert documents_of(tmp_path / "out", "train") == [[vocab_size - 1, 0]]


@pytest.mark.parametrize("size, documents", [(10, 2), (9, 1)])
def test_the_limit_stops_before_the_document_that_would_exceed_it(tmp_path, tokenizer, size, documents):
    manifest = make(tmp_path / "out", tokenizer, ["four", "äöü", "more"], size, 0.0)  # 4 + 6 + 4 bytes

    assert (manifest.documents, manifest.text_bytes) == (documents, 4 + 6 * (documents == 2))


def test_text_without_a_document_is_an_error_that_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(InputError, match="texts: expected at least one document with text"):
        make(tmp_path / "out", tokenizer, ["four"], size=3)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"block_size": 0}, {"validation": 1.0}, {"validation": -0.1}])
def test_options_out_of_range_are_refused(tokenizer, options):
    with pytest.raises(InputError, match=f"--{next(iter(options))}: expected"):
        token_folder.make_request([], tokenizer, **{"size": None, "block_size": 8, "validation": 0.1} | options)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe(300).backend_tokenizer)

    with pytest.raises(InputError, match="expected a tokenizer with an end-of-text token"):
        make(tmp_path / "out", tokenizer)


def truncate_the_map(folder: Path) -> None:
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 2)


def change_the_map(folder: Path) -> None:
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(data[:-2] + b"\1\0")


@pytest.mark.parametrize(
    "damage, message",
    [
        (truncate_the_map, "train.bin has changed"),
        (change_the_map, "train.bin has changed"),
        (lambda folder: (folder / "validation.bin").unlink(), "validation.bin is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json has changed"),
        (lambda folder: (folder / "complete.json").unlink(), "complete.json is missing"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_file_and_remedy(tmp_path, tokenizer, damage, message):
    make(tmp_path / "out", tokenizer)
    damage(tmp_path / "out")

    with pytest.raises(InputError, match=f"out: .*{message}.*python prepare_oscar.py") as caught:
        load_blocks(tmp_path / "out", tokenizer)

    assert "\n" not in str(caught.value)


def test_a_manifest_of_another_form_is_an_error_that_names_the_remedy(tmp_path, tokenizer):
    def build(partial: Path) -> None:
        (partial / "manifest.json").write_text('{"request": {}, "more": 1}')

    with pytest.raises(InputError, match=r"manifest.json: cannot be read .*python prepare_oscar.py"):
        load_blocks(cache.cached(tmp_path / "out", build), tokenizer)


def test_another_tokenizer_is_an_error_that_names_both(tmp_path, tokenizer):
    make(tmp_path / "out", tokenizer)

    with pytest.raises(InputError, match=r"manifest.json: .*\(300 tokens\).*the same tokenizer"):
        load_blocks(tmp_path / "out", bpe(280))


@pytest.mark.parametrize(
    "change", [('"<|endoftext|>"', '"<|end|>"'), ('prefix_space":false', 'prefix_space":true')], ids=str
)
def test_tokenizers_of_equal_size_differ_in_a_word_or_in_what_they_do(tokenizer, change):
    serialised = tokenizer.backend_tokenizer.to_str()
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(serialised.replace(*change)))

    assert len(other) == len(tokenizer)
    assert fingerprint(other) != fingerprint(tokenizer)


def test_a_saved_tokenizer_has_the_same_fingerprint(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "saved")

    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")

    assert fingerprint(again) == fingerprint(tokenizer)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(InputError, match="expected a fast tokenizer"):
        fingerprint(SimpleNamespace(name_or_path="slow"))


def text_folder(path: Path) -> Path:
    path.mkdir()
    (path / "part_1.txt").write_text("\r\n".join(TEXTS))
    return path


def cached(cache: Path) -> list[Path]:
    return [path for path in (cache / "oscar").iterdir() if path.is_dir()]


def test_a_folder_of_text_is_tokenised_once(tmp_path, tokenizer, own_cache, capsys):
    config = SimpleNamespace(data_dir=text_folder(tmp_path / "text"), model_max_length=16)

    first, second = (load_blocks(config, tokenizer) for _ in range(2))

    assert first.train[0].shape == (16,)
    assert torch.equal(first.train[0], second.train[0])
    assert len(cached(own_cache)) == 1
    assert capsys.readouterr().err.count("tokenised") == 1


def test_changed_text_is_tokenised_again(tmp_path, tokenizer, own_cache):
    text = text_folder(tmp_path / "text")
    load_blocks(text, tokenizer, 8)

    changed = (text / "part_1.txt").read_bytes().replace(b"the", b"THE")  # of equal size
    (text / "part_1.txt").write_bytes(changed)
    data = load_blocks(text, tokenizer, 8)

    assert tokenizer.decode(data.train[0]).startswith("THE")
    assert len(cached(own_cache)) == 2


def test_a_damaged_cache_is_made_again(tmp_path, tokenizer, own_cache):
    text = text_folder(tmp_path / "text")
    expected = load_blocks(text, tokenizer, 8).train[0]
    (folder,) = cached(own_cache)
    truncate_the_map(folder)

    assert torch.equal(load_blocks(text, tokenizer, 8).train[0], expected)


def test_of_several_ranks_one_tokenises_and_the_others_wait(tmp_path, tokenizer, capfd, monkeypatch):
    text = text_folder(tmp_path / "text")
    fork = multiprocessing.get_context("fork")
    all_here = fork.Barrier(4)

    def meet_then_lock(path):  # the worst case: every rank has seen that there is nothing
        all_here.wait(timeout=60)
        return locked(path)

    monkeypatch.setattr(cache, "locked", meet_then_lock)
    ranks = [fork.Process(target=load_blocks, args=(text, tokenizer, 8)) for _ in range(4)]

    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)

    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert capfd.readouterr().err.count("tokenised") == 1


def test_without_a_data_folder_the_embedded_sample_is_used(tokenizer):
    data = load_blocks(SimpleNamespace(data_dir=None, model_max_length=64), tokenizer)

    assert data.train[0].shape == (64,)
    assert len(data.validation) > 0


@pytest.fixture
def saved(tmp_path, tokenizer) -> Path:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_command_makes_a_folder_that_can_be_loaded(tmp_path, tokenizer, saved, capsys):
    arguments = f"--input {text_folder(tmp_path / 'text')} --output {tmp_path / 'out'} --tokenizer {saved} --size 1KB"

    prepare_oscar.main([*arguments.split(), "--block_size", "16", "--validation", "0.2"])
    prepare_oscar.main([*arguments.split(), "--block_size", "16", "--validation", "0.2"])

    data = load_blocks(tmp_path / "out", tokenizer)
    assert (data.block_size, len(data.train) > 0, len(data.validation) > 0) == (16, True, True)
    first, second = capsys.readouterr().out.splitlines()
    assert first in second
    assert second.endswith("(made earlier from the same input)")
    assert read_manifest(tmp_path / "out").text_bytes <= 1000


def test_the_command_replaces_a_folder_only_when_told_to(tmp_path, saved):
    arguments = f"--input {text_folder(tmp_path / 'text')} --output {tmp_path / 'out'} --tokenizer {saved}".split()
    prepare_oscar.main([*arguments, "--block_size", "16"])

    with pytest.raises(InputError, match="--overwrite"):
        prepare_oscar.main([*arguments, "--block_size", "8"])
    prepare_oscar.main([*arguments, "--block_size", "8", "--overwrite"])

    assert read_manifest(tmp_path / "out").request.block_size == 8


@pytest.mark.parametrize("size, message", [("1B", "--size"), ("nonsense", "expected a number of bytes")])
def test_the_command_refuses_a_size_that_is_none_or_too_small(tmp_path, saved, size, message):
    arguments = f"--input {text_folder(tmp_path / 'text')} --output {tmp_path / 'out'} --tokenizer {saved}".split()

    with pytest.raises(InputError, match=message):
        prepare_oscar.main([*arguments, "--size", size])


@pytest.mark.parametrize("file", ["thesis.txt", "manifest.json"])
def test_other_peoples_files_are_never_replaced(tmp_path, saved, file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).write_text("years of work")
    (tmp_path / "out" / "notes").touch()
    arguments = f"--input {text_folder(tmp_path / 'text')} --output {tmp_path / 'out'} --tokenizer {saved} --overwrite"

    with pytest.raises(InputError, match="got a path that holds no token blocks"):
        prepare_oscar.main(arguments.split())

    assert (tmp_path / "out" / file).read_text() == "years of work"


def test_an_error_half_way_leaves_the_earlier_folder_as_it_was(tmp_path, tokenizer, saved):
    earlier = make(tmp_path / "out", tokenizer)
    (tmp_path / "en.jsonl").write_text('{"content": "a"}\n{oops\n')
    arguments = f"--input {tmp_path / 'en.jsonl'} --output {tmp_path / 'out'} --tokenizer {saved} --overwrite"

    with pytest.raises(InputError, match="line 2"):
        prepare_oscar.main(arguments.split())

    assert read_manifest(tmp_path / "out") == earlier


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

    assert not (tmp_path / "out").exists()
    assert make(tmp_path / "out", tokenizer).documents == len(TEXTS)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path, saved):
    (tmp_path / "file").touch()
    arguments = f"--input {text_folder(tmp_path / 'text')} --output {tmp_path / 'file' / 'out'} --tokenizer {saved}"

    with pytest.raises(InputError, match="cannot be written"):
        prepare_oscar.main(arguments.split())


@pytest.mark.parametrize("arguments", ["--output out", "--input a --hub en --output out", "--input a"])
def test_the_command_needs_one_source_and_an_output(arguments):
    with pytest.raises(SystemExit, match="2"):
        prepare_oscar.main(arguments.split())


@pytest.mark.medium
def test_the_command_says_in_one_line_what_is_wrong(tmp_path, saved):
    (tmp_path / "en.jsonl").write_text('{"content": "a"}\n{oops\n')
    command = f"prepare_oscar.py --input {tmp_path / 'en.jsonl'} --output {tmp_path / 'out'} --tokenizer {saved}"

    run = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)

    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'en.jsonl'}, line 2: expected one JSON object")
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()
