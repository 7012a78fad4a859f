"""--model FILE.py:build: a user's own model goes through every strategy that does not cut GPT-2."""

import json
import sys

import pytest
import torch
from torch import nn

from benchmark.arguments import parse
from benchmark.example_model import Lstm
from benchmark.names import check_model
from benchmark.training.model_config import model_config
from benchmark.training.own_model import blocks, build_own
from common.errors import InputError
from common.paths import ROOT
from staff.tests.workers import group

pytest.importorskip("tensorboard")

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

# Without an nn.ModuleList; the gradient of a bias before a norm is zero but for rounding; one layer gets none.
ODD = """
import torch
from torch import nn
from benchmark.engines.ddp import DDP
from benchmark.engines.fsdp import FSDP
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(1, 8, 3), nn.GroupNorm(8, 8), nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)
    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))).mean(-1))
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
def build():
    return Odd(), {"x": torch.randn(64, 1, 12), "y": torch.randint(4, (64,))}, loss
class Silent(FSDP):
    def wrap(self, model):
        return model
    def backward(self, loss, last):
        return super(FSDP, self).backward(loss, last)
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
@pytest.mark.parametrize(("flags", "ddp"), [([], "not proved"), (["--find_unused_parameters"], "ok")])
def test_an_odd_model_is_synchronised_not_accused_and_its_unused_parameters_are_named(flags, ddp, tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    words = ["--model", f"{tmp_path}/odd.py:build", "--engine", f"{tmp_path}/odd.py:FSDP,Silent,DDP", *flags]

    codes = group(ROOT / "benchmark" / "prove.py", 2, tmp_path, *words, "--output_dir", tmp_path / "p")

    fsdp, silent, of_ddp = json.loads((tmp_path / "p" / "proof.json").read_text())
    assert codes == [1, 0], (tmp_path / "log0.txt").read_text()[-2000:]
    assert (fsdp["gradient"], of_ddp["gradient"]) == ("ok", ddp), (fsdp, of_ddp)
    assert "sends 0 elements" in silent["sentence"] or "error" in silent["gradient"]
    assert ("--find_unused_parameters" in of_ddp["left_out"]) == (not flags)


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="starts workers with gloo")
def test_a_run_that_sends_nothing_is_an_error(tmp_path):
    silent = "from benchmark.engines.fsdp import FSDP\nFSDP.wrap, FSDP.backward = Silent.wrap, Silent.backward\n"
    (tmp_path / "odd.py").write_text(ODD + silent)
    words = ["--model", f"{tmp_path}/odd.py:build", "--strategy", "fsdp", "--max_steps", 4]

    codes = group(ROOT / "benchmark" / "run.py", 2, tmp_path, *words)

    assert 0 not in codes and not (tmp_path / "run" / "result.json").exists()
    assert "sends nothing" in (tmp_path / "log0.txt").read_text()


def test_blocks_are_the_members_of_outer_lists_or_what_the_file_says(file):
    inner = nn.ModuleList([nn.Linear(1, 1)])
    nested = nn.ModuleList([nn.ModuleDict({"inner": inner}), nn.ReLU()])

    assert blocks(nested) == [nested[0]]  # neither the list inside, nor what has no parameters
    assert len(blocks(Lstm())) == 4
    assert len(blocks(build_own(f"{file}:right")[0])) == 4
    file.write_text(f"{WRONG}\ndef blocks(model):\n    return [model.layers[0]]\n")
    assert len(blocks(build_own(f"{file}:right")[0])) == 1


@pytest.mark.parametrize(
    ("name", "named"),
    [("build", "Lstm, dict"), ("unequal", "same first dimension"), ("other", "other")],
)
def test_a_model_that_cannot_be_used_is_one_line(file, name, named):
    with pytest.raises(InputError, match=named):
        build_own(f"{file}:{name}")


def test_a_file_that_is_not_there_is_one_line():
    with pytest.raises(InputError, match=r"nowhere\.py"):
        check_model("--model", "nowhere.py:build")


def test_floating_examples_have_the_dtype_of_the_model(tmp_path):
    path = tmp_path / "line.py"
    path.write_text(
        "import torch\ndef build():\n    loss = lambda model, batch: model(batch['x']).square().mean()\n"
        "    return torch.nn.Linear(2, 1), {'x': torch.ones(3, 2)}, loss\n"
    )
    model, examples = build_own(f"{path}:build")

    assert model.double()(x=examples[0]["x"]).loss.dtype == torch.float64


def test_what_needs_gpt2_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="cuts GPT-2 into parts"):
        parse(["--strategy", "pipeline", "--model", EXAMPLE])
    with pytest.raises(InputError, match="expected a GPT-2, a Llama or a T5"):
        model_config(EXAMPLE)
