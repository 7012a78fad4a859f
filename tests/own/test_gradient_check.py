"""--check_gradients: the factor, the parameters and the cause that it names, and a run of two workers."""

import pytest
import torch

from common.gradient_check import RIGHT, Part, describe
from common.paths import ROOT
from tests.own.workers import run

SHAPES = {"a.weight": 40, "a.bias": 5, "b.weight": 30, "b.bias": 5}


def parts(change):
    """Parts whose `got` is what `change` makes of (own, expected, number of the parameter)."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for k, (name, size) in enumerate(SHAPES.items()):
        own = torch.randn(size, generator=generator)
        expected = (own.double() + torch.randn(size, generator=generator).double()) / 2
        made.append(Part(name, change(own.double(), expected, k), expected, own))
    return made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda own, mean, k: mean * (1 + 1e-6), RIGHT),
        (lambda own, mean, k: 2 * mean, "x 2.0000 (every parameter): they were summed and not divided"),
        (lambda own, mean, k: mean / 2, "x 0.5000 (every parameter): they were divided by the number of workers once"),
        (lambda own, mean, k: 1.01 * mean, "x 1.0100 (every parameter): the loss was scaled"),
        (lambda own, mean, k: 0 * mean, "x 0.0000 (every parameter): there is no gradient"),
        (lambda own, mean, k: own, "this worker's own (every parameter): they were not exchanged"),
        (lambda own, mean, k: own if k == 2 else mean, "this worker's own (b.weight): they were not exchanged"),
        (lambda own, mean, k: mean.flip(0), "not a multiple of what is expected (every parameter)"),
        (lambda own, mean, k: mean * float("nan"), "not a multiple of what is expected (every parameter)"),
    ],
)
def test_the_factor_the_parameters_and_the_cause_are_named(change, words):
    assert describe(parts(change), world_size=2).startswith(words)


@pytest.mark.medium
def test_a_run_of_two_workers_says_what_is_wrong_with_its_gradients(tmp_path):
    """test_task_scripts.py runs a right one."""
    script, right = tmp_path / "run_glue.py", (ROOT / "task2b_allreduce/run_glue.py").read_text()
    script.write_text(right.replace("parameter.grad /= world_size", "parameter.grad /= 1"))

    run(script, 2, tmp_path / "out", "--max_steps", 1, "--dropout", 0, "--check_gradients", "--no_cuda", "--do_train")

    assert "gradient: x 2.0000 (every parameter): they were summed" in (tmp_path / "out/log0.txt").read_text()
