"""--model FILE.py:build: a user's own model goes through every strategy that does not cut GPT-2."""

import json
import sys

import pytest
import torch
from torch import nn

from benchmark import strategies
from benchmark.example_model import Lstm
from benchmark.names import check_model
from benchmark.training.model_config import model_config
from benchmark.training.own_model import blocks, build_own
from common.errors import InputError
from common.paths import ROOT
from tests.own.workers import group

EXAMPLE = f"{ROOT}/benchmark/example_model.py:build"
WRONG = """
from benchmark.example_model import build as right
from benchmark.engines.ddp import DDP
from benchmark.engines.fsdp import FSDP
from benchmark.engines.own import OwnZero3
class Halves(DDP):
    def backward(self, loss, last):
        return super().backward(loss / 2, last) * 2
def build():
    return right()[:2]
def unequal():
    model, batch, loss = right()
    return model, batch | {"more": batch["symbols"][1:]}, loss
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(WRONG)
    return path


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="starts workers with gloo")
def test_engines_are_proved_with_a_users_model_and_a_wrong_one_is_named(tmp_path, file):
    words = ["--model", EXAMPLE, "--output_dir", tmp_path / "p", "--engine", f"{file}:FSDP,OwnZero3,Halves"]

    codes = group(ROOT / "benchmark" / "prove.py", 2, tmp_path, *words)

    printed = (tmp_path / "log0.txt").read_text()
    rows = json.loads((tmp_path / "p" / "proof.json").read_text())
    assert codes == [1, 0], printed[-2000:]
    assert [row["gradient"] for row in rows] == ["ok", "ok", "x 0.5000 (every parameter)"]
    assert "2 examples each, 4 blocks" in printed
    assert "Halves with accumulation 1: x 0.5000 (every parameter)" in printed


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="starts workers with gloo")
def test_the_metric_of_a_users_model_is_a_column_of_compare(tmp_path):
    words = ["--model", EXAMPLE, "--output_dir", tmp_path / "c", "--only", "fsdp", "--max_steps", 4]

    codes = group(ROOT / "benchmark" / "compare.py", 2, tmp_path, *words)

    printed = (tmp_path / "log0.txt").read_text()
    assert codes == [0, 0], printed[-2000:]
    metrics = [row["metric"] for row in json.loads((tmp_path / "c" / "comparison.json").read_text())["rows"]]
    assert " metric " in printed
    assert 0 < min(metrics) <= max(metrics) < min(metrics) + 0.01 < 0.1  # four steps: as good as guessing one of 64


def test_blocks_are_the_members_of_outer_lists_or_what_the_file_says(file):
    inner = nn.ModuleList([nn.Linear(1, 1)])
    nested = nn.ModuleList([nn.ModuleDict({"inner": inner}), nn.ReLU()])

    assert blocks(nested) == [nested[0]]  # neither the list inside, nor what has no parameters
    assert len(blocks(Lstm())) == 4
    assert len(blocks(build_own(f"{file}:right")[0])) == 4
    file.write_text(f"{WRONG}\ndef blocks(model):\n    return [model.layers[0]]\n")
    assert len(blocks(build_own(f"{file}:right")[0])) == 1


def test_a_model_that_cannot_be_used_is_one_line(file):
    for name, expected in (("build", "returned Lstm, dict; expected"), ("unequal", "same first dimension")):
        with pytest.raises(InputError, match=expected):
            build_own(f"{file}:{name}")
    with pytest.raises(InputError, match="no function 'other'"):
        build_own(f"{file}:other")
    with pytest.raises(InputError, match=r"no file nowhere\.py"):
        check_model("--model", "nowhere.py:build")


def test_floating_examples_have_the_dtype_of_the_model(tmp_path):
    path = tmp_path / "line.py"
    path.write_text(
        "import torch\ndef build():\n    loss = lambda model, batch: model(batch['x']).square().mean()\n"
        "    return torch.nn.Linear(2, 1), {'x': torch.ones(3, 2)}, loss\n"
    )
    model, examples = build_own(f"{path}:build")

    assert model.double()(x=examples[0]["x"]).loss.dtype == torch.float64


def test_only_gpt2_is_cut(monkeypatch):
    settings = type("Settings", (), {"strategy": "pipeline", "model": EXAMPLE, "precision": "fp32"})

    assert "cuts GPT-2 into parts" in strategies.gpt2_in_fp32(settings)


def test_a_command_that_needs_a_configuration_says_so():
    with pytest.raises(InputError, match="expected a GPT-2 or a T5"):
        model_config(EXAMPLE)
