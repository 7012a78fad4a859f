"""A damaged copy of a model is one line before the run starts, which says what to copy."""

import re

import pytest
import torch

from common.errors import InputError
from common.models.load import model_path
from tests.own.model_copies import copy_of_tiny, in_shards


@pytest.fixture
def copy(tmp_path):
    """A function that gives a folder of this test's own with some files of the tiny model."""
    return lambda kind, *names: copy_of_tiny(kind, tmp_path / kind, *names)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4475312\n"


@pytest.mark.parametrize(
    "name, content",
    [
        ("model.safetensors", LFS_POINTER),
        ("model.safetensors", None),  # cut off
        ("pytorch_model.bin", LFS_POINTER),
        ("pytorch_model.bin", b""),
    ],
)
def test_weights_that_are_none_are_seen_before_the_run_starts(copy, name, content):
    folder = copy("bert")
    weights = (folder / "model.safetensors").rename(folder / name)
    weights.write_bytes(weights.read_bytes()[:-100] if content is None else content)

    with pytest.raises(InputError, match=rf"{re.escape(name)} is damaged .*; copy it again"):
        model_path(str(folder), "bert")


def test_a_folder_that_holds_no_model_of_the_kind_is_refused(copy):
    folder = copy("bert", "tokenizer.json")
    with pytest.raises(InputError, match=r"bert is not a model: it has no config\.json"):
        model_path(str(folder), "bert")
    for content in (b"", b"{", b"[]", b"\xff"):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(InputError, match=r"config\.json"):
            model_path(str(folder), "bert")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match=r"it has no model\.safetensors"):
        model_path(str(folder), "bert")
    with pytest.raises(InputError, match=r"expected a model of type bert, .* holds gpt2"):
        model_path(str(copy("gpt2")), "bert")


def test_a_zip_of_weights_that_was_cut_off_is_seen_before_the_run_starts(copy):
    folder = copy("bert")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(1000)}, folder / "pytorch_model.bin")
    assert model_path(str(folder), "bert") == str(folder)
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:-100])

    with pytest.raises(InputError, match=r"pytorch_model\.bin is damaged \(it was cut off\); copy it again"):
        model_path(str(folder), "bert")


def test_a_missing_file_of_several_with_weights_is_named(copy):
    folder = in_shards(copy("bert"))
    assert model_path(str(folder), "bert") == str(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors is damaged \(it is missing\); copy it"):
        model_path(str(folder), "bert")


def test_a_folder_with_a_configuration_alone_is_enough_for_a_configuration(copy):
    folder = copy("bert", "config.json")

    assert model_path(str(folder), "bert", weights=False) == str(folder)
