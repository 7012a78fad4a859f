"""The cache: whichever rank fills it, whenever it is killed, and whatever is damaged, the next run has whole files."""

import hashlib
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from cluster.random_bert import random_bert
from common.arguments import parse_glue_arguments
from common.cache import cached
from common.data.glue import load_glue
from common.data.oscar import read_blocks
from common.data.sample_data import oscar_sample_file
from common.errors import InputError
from common.models.load import KINDS, load_tokenizer, model_path
from common.paths import ROOT

pytestmark = pytest.mark.medium


def fill() -> None:
    """Use everything that is cached, but for the models of cluster/random_bert.py, as the scripts use it."""
    for kind in KINDS:
        model_path("tiny", kind)
    load_glue(parse_glue_arguments("task1_single", []), load_tokenizer("tiny", "bert"))
    read_blocks(oscar_sample_file(), load_tokenizer("tiny", "gpt2"), 64)


def files_of(cache: Path) -> dict[str, str]:
    """Path and SHA-256 of every file. Locks are left out, since nobody reads them."""
    checksums = {}
    for path in cache.rglob("*"):
        if path.is_file() and path.suffix != ".lock":
            content = path.read_bytes()
            if path.name == "manifest.json":  # it names the tokenizer's folder, which is elsewhere in every cache
                content = re.sub(rb'"tokenizer": "[^"]*"', b"", content)
            if path.name == "complete.json":  # it has the manifest's checksum
                content = b""
            checksums[path.relative_to(cache).as_posix()] = hashlib.sha256(content).hexdigest()
    return checksums


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A complete cache. It is copied, not used."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COS598D_CACHE", str(cache))
        before = random_states()
        fill()
        assert random_states() == before
    return cache


def random_states() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_process_makes_the_same_bytes_whatever_its_hash_seed_and_locale(filled, cache):
    command = [sys.executable, "-c", "from tests.own.test_cache import fill; fill()"]
    own = {"PYTHONHASHSEED": "1", "PYTHONUTF8": "0", "LC_ALL": "C"}

    subprocess.run(command, cwd=ROOT, env=os.environ | own, check=True)

    assert files_of(cache) == files_of(filled)


KILLS = [3, *(pytest.param(number, marks=pytest.mark.proof) for number in range(3))]
KILLS += [pytest.param(number, marks=pytest.mark.slow) for number in range(4, 100)]


@pytest.mark.parametrize("number", KILLS)
def test_a_process_that_is_killed_while_it_fills_the_cache_leaves_nothing_half_made(filled, cache, capfd, number):
    process = multiprocessing.get_context("fork").Process(target=fill)
    process.start()
    process.join(random.Random(number).uniform(0, 3))  # at any moment; whether it has finished does not matter
    process.kill()
    process.join()

    fill()

    assert " is damaged (" not in capfd.readouterr().err
    assert files_of(cache) == files_of(filled)


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


HARMS = [_remove, _cut, _change, _replace_by_a_folder, _replace_by_a_link_to_itself]


@pytest.mark.parametrize("name", ["complete.json", "one", "other"])
@pytest.mark.parametrize("harm", HARMS)
def test_any_damaged_file_of_a_cached_folder_is_reported_in_one_line_and_rebuilt(tmp_path, capfd, name, harm):
    def build(folder: Path) -> None:
        for file in ("one", "other"):
            (folder / file).write_text(f"content of {file}")

    harm(cached(tmp_path / "thing", build) / name)
    cached(tmp_path / "thing", build)

    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path / 'thing'} is damaged ({name}")
    assert all((tmp_path / "thing" / file).read_text() == f"content of {file}" for file in ("one", "other"))
    assert cached(tmp_path / "thing", build).is_dir() and capfd.readouterr().err == ""
    shutil.rmtree(tmp_path / "thing")
    (tmp_path / "thing").write_text("not a folder")  # and a file in its place is replaced
    assert cached(tmp_path / "thing", build).is_dir()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "thing.lock").mkdir()

    with pytest.raises(InputError, match=r"cannot write the cache .*set COS598D_CACHE to another folder"):
        cached(tmp_path / "thing", lambda folder: None)


def test_what_building_does_wrong_leaves_the_name_free(tmp_path):
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        cached(tmp_path / "thing", build)

    assert files_of(tmp_path) == {}


def test_a_model_with_random_weights_is_complete_and_has_the_same_weights_every_time(cache, monkeypatch):
    small = {"vocab_size": 1300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setitem(random_bert.__globals__["SIZES"], "small", small)
    first = files_of(random_bert("small"))
    shutil.rmtree(cache)

    assert files_of(random_bert("small")) == first
    BertModel.from_pretrained(random_bert("small"))
