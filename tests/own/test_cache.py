"""The cache: whichever rank fills it, whenever it is killed, and whatever is damaged, the next run has whole files."""

import hashlib
import itertools
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertModel

from cluster.random_bert import random_bert
from common.arguments import parse_glue_arguments
from common.cache import cached
from common.data.glue import load_glue
from common.data.oscar import load_blocks
from common.data.sample_data import oscar_sample_file
from common.errors import InputError
from common.models.load import KINDS, load_tokenizer, model_path
from common.paths import ROOT
from tests.own.warm import Script

pytestmark = pytest.mark.medium

PROOF = pytest.mark.proof


def fill() -> None:
    """Use everything that is cached, but for the models of cluster/random_bert.py, as the scripts use it."""
    for kind in KINDS:
        model_path("tiny", kind)
    load_glue(parse_glue_arguments("task1_single", []), load_tokenizer("tiny", "bert"))
    load_blocks(oscar_sample_file(), load_tokenizer("tiny", "gpt2"), 64)


def files_of(cache: Path) -> dict[str, str]:
    """Path and SHA-256 of every file. Locks are left out, since nobody reads them."""
    found = {}
    for path in cache.rglob("*"):
        if path.is_file() and path.suffix != ".lock":
            content = path.read_bytes()
            if path.name == "manifest.json":  # it names the tokenizer's folder, which is elsewhere in every cache
                content = re.sub(rb'"tokenizer": "[^"]*"', b"", content)
            if path.name == "complete.json":  # it has the manifest's checksum
                content = b""
            found[path.relative_to(cache).as_posix()] = hashlib.sha256(content).hexdigest()
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A complete cache. It is copied, not used."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COS598D_CACHE", str(cache))
        fill()
    return cache


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


FILL_ON_A_RANK = """
import sys, torch.distributed as dist
from tests.own.test_cache import fill
rank, first, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if rank != first:
    dist.barrier()
fill()
if rank == first:
    dist.barrier()
fill()
"""


@pytest.mark.medium
@pytest.mark.parametrize("first", [pytest.param(0, marks=PROOF), 1])
def test_whichever_rank_of_a_process_group_comes_first_fills_the_cache(filled, cache, tmp_path, first):
    (tmp_path / "fill.py").write_text(FILL_ON_A_RANK)
    words, own = (first, tmp_path / "store"), {"COS598D_CACHE": str(cache)}
    ranks = [Script(tmp_path / "fill.py", (rank, *words), tmp_path / f"log{rank}", own) for rank in range(2)]

    codes = [rank.wait(timeout=300) for rank in ranks]

    said = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], said
    assert " is damaged (" not in "".join(said)
    assert files_of(cache) == files_of(filled)


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=PROOF), pytest.param(3, marks=PROOF)])
def test_a_process_that_is_killed_while_it_fills_the_cache_leaves_nothing_half_made(filled, cache, capfd, number):
    _kill_and_fill_again(filled, cache, capfd, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4, 100))
def test_a_process_may_be_killed_at_any_moment_while_it_fills_the_cache(filled, cache, capfd, number):
    _kill_and_fill_again(filled, cache, capfd, number)


def _kill_and_fill_again(filled, cache, capfd, number):
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


@pytest.mark.parametrize(
    "harms",
    [pytest.param([_remove], id="removed", marks=PROOF), pytest.param(HARMS, id="damaged in turns")],
)
def test_any_damaged_file_of_the_cache_is_reported_in_one_line_and_rebuilt(filled, cache, capfd, harms):
    whole = files_of(filled)
    shutil.copytree(filled, cache)
    for name, harm in zip(sorted(whole), itertools.cycle(harms), strict=False):
        harm(cache / name)
        capfd.readouterr()

        fill()

        lines = [line for line in capfd.readouterr().err.splitlines() if " is damaged (" in line]
        assert len(lines) == 1, (name, lines)
        assert lines[0].startswith(f"{cache / Path(name).parent} is damaged (")
        assert Path(name).name in lines[0] or name.endswith("complete.json")
        assert files_of(cache) == whole, name


def test_a_file_in_the_place_of_a_cached_folder_is_replaced(cache):
    Path(model_path("tiny", "bert")).rename(cache / "moved")
    (cache / "models" / "tiny-bert-v2-3").write_text("not a folder")

    assert files_of(Path(model_path("tiny", "bert"))) == files_of(cache / "moved")


def test_a_cache_that_an_older_version_left_without_its_list_of_files_is_rebuilt(filled, cache, capfd):
    shutil.copytree(filled, cache)
    folder = Path(model_path("tiny", "gpt2"))
    for name in ("complete.json", "config.json", "model.safetensors"):  # what rank 1 left, which saved a tokenizer only
        (folder / name).unlink()

    fill()

    assert "complete.json is missing" in capfd.readouterr().err
    assert files_of(cache) == files_of(filled)


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


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("task1_single/run_glue.py --max_steps 1", marks=pytest.mark.medium),
        pytest.param(
            "task2b_allreduce/run_gpt2.py --max_steps 1 --world_size 1 --batch_size 4", marks=pytest.mark.proof
        ),
        pytest.param("pipeline/run_gpt2.py --max_steps 1 --batch_size 4", marks=pytest.mark.proof),
        pytest.param("-m benchmark.run --max_steps 3 --dropped 1", marks=pytest.mark.proof),
    ],
)
def test_a_command_whose_cached_model_lost_a_file_says_so_in_one_line_and_succeeds(tmp_path, filled, command):
    if "benchmark.run" in command:
        pytest.importorskip("tensorboard", reason="needs the benchmark's packages: python install.py benchmark")
    cache = tmp_path / "cache"
    shutil.copytree(filled, cache)
    for file in (cache / "models").glob("tiny-*/model.safetensors"):
        file.unlink()
    log, output = tmp_path / "log", ("--output_dir", str(tmp_path / "run"))

    if command.startswith(("-m", "task2b")):  # task 2b sets how processes start, which only a new Python lets it do
        environment = {**os.environ, "COS598D_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        with open(log, "w") as file:
            words = [sys.executable, *command.split(), *output]
            code = subprocess.run(words, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=300).returncode
    else:
        script, *flags = command.split()
        code = Script(ROOT / script, (*flags, *output), log, {"COS598D_CACHE": str(cache)}).wait(timeout=300)

    assert code == 0, log.read_text()[-3000:]
    assert log.read_text().count("model.safetensors is missing") == 1
