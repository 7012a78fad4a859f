"""--check_gradients: the factor, the parameters and the cause that it names; test_task_scripts.py has runs with it."""

import pytest
import torch

from common.gradient_check import RIGHT, ParameterPart, describe

SHAPES = {"a.weight": 40, "a.bias": 5, "b.weight": 30, "b.bias": 5}


@pytest.mark.parametrize(("change", "words"), [
    (lambda own, mean, k: mean * (1 + 1e-6), RIGHT),
    (lambda own, mean, k: 2 * mean, "x 2.0000 (every parameter): they were summed and not divided"),
    (lambda own, mean, k: mean / 2, "x 0.5000 (every parameter): they were divided by the number of workers once"),
    (lambda own, mean, k: 1.01 * mean, "x 1.0100 (every parameter): the loss was scaled"),
    (lambda own, mean, k: 0 * mean, "x 0.0000 (every parameter): there is no gradient"),
    (lambda own, mean, k: own, "this worker's own (every parameter): they were not exchanged"),
    (lambda own, mean, k: own if k == 2 else mean, "this worker's own (b.weight): they were not exchanged"),
    (lambda own, mean, k: mean.flip(0), "not a multiple of what is expected (every parameter)"),
    (lambda own, mean, k: mean * float("nan"), "not a multiple of what is expected (every parameter)"),
])  # fmt: skip
def test_the_factor_the_parameters_and_the_cause_are_named(change, words):
    generator = torch.Generator().manual_seed(3)
    parts = []
    for k, (name, size) in enumerate(SHAPES.items()):
        own, other = (torch.randn(size, generator=generator) for _ in range(2))
        expected = (own.double() + other.double()) / 2
        parts.append(ParameterPart(name, change(own.double(), expected, k), expected, own))

    assert describe(parts, world_size=2).startswith(words)
