"""The cache: whichever rank fills it, whenever it is killed, and whatever is missing, the next run has whole files."""

import hashlib
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from cluster.demo.random_bert import random_bert
from common.arguments import parse_glue_arguments
from common.cache import cached, read_cached
from common.data.glue import load_glue
from common.data.oscar import read_blocks
from common.data.sample_data import oscar_sample_file
from common.errors import InputError
from common.models.load import load_tokenizer, model_path
from common.models.tiny import KINDS
from common.paths import ROOT
from staff.tests.gpu.fake_group import joined


def fill() -> None:
    """Use everything that is cached, but for the models of cluster/demo/random_bert.py, as the scripts use it."""
    for kind in KINDS:
        model_path("tiny", kind)
    load_glue(parse_glue_arguments("task1_single", []), load_tokenizer("tiny", "bert"))
    read_blocks(oscar_sample_file(), load_tokenizer("tiny", "gpt2"), 64)


def files_of(cache: Path) -> dict[str, str]:
    """Name and SHA-256 of every file. A folder of tokens is named after the time at which its text was written."""
    checksums = {}
    for path in cache.rglob("*"):
        if path.is_file() and path.suffix != ".lock" and path.name not in ("manifest.json", "complete.json"):
            name = re.sub(r"oscar/\w+", "oscar", path.relative_to(cache).as_posix())
            checksums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return checksums


def random_states() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


@pytest.mark.medium
def test_killed_or_not_with_any_hash_seed_and_locale_every_process_makes_the_same_bytes(tmp_path, monkeypatch, capfd):
    own = {"PYTHONHASHSEED": "1", "PYTHONUTF8": "0", "LC_ALL": "C", "COS598D_CACHE": str(tmp_path / "other")}
    command = [sys.executable, "-c", "from staff.tests.common.test_cache import fill; fill()"]
    subprocess.run(command, cwd=ROOT, env=os.environ | own, check=True)

    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    for seconds in (0.1, 0.4, 1):  # at any moment; whether it has finished does not matter
        process = multiprocessing.get_context("fork").Process(target=fill)
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
    before = random_states()
    fill()

    assert random_states() == before
    assert "damaged" not in capfd.readouterr().err
    assert len(files_of(tmp_path / "cache")) > 15
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "other")


def test_one_rank_builds_and_those_that_come_meanwhile_wait_and_read_the_whole(tmp_path):
    built, read = [], []

    def build(folder: Path) -> None:
        (folder / "one").write_text("o")
        time.sleep(0.2)
        (folder / "one").write_text("one")
        built.append(1)

    def rank(fresh: bool) -> None:
        read.append(read_cached(tmp_path / "thing", build, lambda folder: (folder / "one").read_text(), fresh))

    ranks = [threading.Thread(target=rank, args=(fresh,)) for fresh in (False, False, True)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()

    assert read == ["one"] * 3
    assert 1 <= len(built) <= 2  # once, and once more for the rank that asks for it


@pytest.mark.parametrize("harm", ["remove", "cut", "replace by a folder", "link to itself", "no folder"])
@pytest.mark.parametrize("name", ["complete.json", "one", "other"])
def test_a_folder_with_a_damaged_file_is_reported_in_one_line_and_rebuilt(tmp_path, capfd, name, harm):
    def build(folder: Path) -> None:
        for file in ("one", "other"):
            (folder / file).write_text(f"content of {file}")

    path = cached(tmp_path / "thing", build) / name
    content = path.read_bytes()
    path.unlink()
    if harm == "cut":
        path.write_bytes(content[:-1])
    elif harm == "replace by a folder":
        path.mkdir()
    elif harm == "link to itself":
        path.symlink_to(path)
    elif harm == "no folder":
        shutil.rmtree(tmp_path / "thing")
        (tmp_path / "thing").write_text("not a folder")
    cached(tmp_path / "thing", build)

    assert capfd.readouterr().err == f"{tmp_path / 'thing'} is damaged; rebuilding it\n"
    assert all((tmp_path / "thing" / file).read_text() == f"content of {file}" for file in ("one", "other"))
    assert cached(tmp_path / "thing", build).is_dir() and capfd.readouterr().err == ""
    assert {file.name for file in tmp_path.iterdir()} == {"thing", "thing.lock"}


def test_a_cache_that_cannot_be_written_is_one_line_and_a_mistake_in_building_leaves_the_name_free(tmp_path):
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        cached(tmp_path / "thing", build)
    assert not (tmp_path / "thing").exists()
    (tmp_path / "locked.lock").mkdir()
    with pytest.raises(InputError, match=r"cannot write the cache .*set COS598D_CACHE to another folder"):
        cached(tmp_path / "locked", build)


def test_models_that_are_made_are_whole_on_any_rank_and_the_same_every_time(tmp_path, monkeypatch):
    small = {"vocab_size": 1300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setitem(random_bert.__globals__["SIZES"], "small", small)
    made = []
    for rank in (0, 1):  # transformers itself saves nothing on a rank above 0
        monkeypatch.setenv("COS598D_CACHE", str(tmp_path / f"{rank}"))
        with joined(rank, 2):
            BertModel.from_pretrained(model_path("tiny", "bert"))
            BertModel.from_pretrained(random_bert("small"))
        made.append(files_of(tmp_path / f"{rank}"))

    assert made[0] == made[1]
