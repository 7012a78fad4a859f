"""Draws the inputs of a run from a seed, in the test process; a rank gets its own inputs, and never the seed."""

import numpy as np

# What gradients of a real model look like to a collective: several sizes, one number, a vector, three dimensions.
SHAPES = ((3, 4), (4,), (), (2, 3, 2), (4, 3), (1,), (7,), (5, 1))


def generator(*key: int) -> np.random.Generator:
    """Return a generator that depends on all numbers of its key."""
    return np.random.default_rng(key)


def gradients(seed: int, rank: int, shapes: list) -> list[np.ndarray]:
    """Return the gradients that one rank starts with."""
    draw = generator(seed, 1, rank)
    return [np.asarray(draw.normal(size=shape), np.float32) for shape in shapes]


def start_value(rank: int) -> float:
    """Return the value of all parameters of a rank, where only gradients count; ranks differ, so that a mean shows."""
    return 0.5 + 0.25 * rank
