"""Inputs that are drawn anew for every run: alike in a rank and in the test process, from the same numbers."""

import numpy as np

SHARED_TOKENS = 8  # token ids that several examples use; above them each example has one of its own
TOKENS = 4  # tokens in an example
WIDTH = 5

# What gradients of a real model look like to a collective: several sizes, one number, a vector, three dimensions.
SHAPES = ((3, 4), (4,), (), (2, 3, 2), (4, 3), (1,), (7,), (5, 1))


def generator(*key: int) -> np.random.Generator:
    """A generator that depends on all numbers of its key."""
    return np.random.default_rng(key)


def gradients(seed: int, rank: int, shapes: list) -> list[np.ndarray]:
    """The gradients that one rank starts with."""
    draw = generator(seed, 1, rank)
    return [np.asarray(draw.normal(size=shape), np.float32) for shape in shapes]


def weight(rank: int) -> float:
    """Every element of a rank's parameters where only gradients count; the ranks differ, so that a mean shows."""
    return 0.5 + 0.25 * rank


def examples(seed: int, count: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (count, TOKENS) and labels (count,); example i begins with a token of its own, see `number`."""
    draw = generator(seed, 2, first)
    ids = draw.integers(0, SHARED_TOKENS, (count, TOKENS))
    ids[:, 0] = SHARED_TOKENS + first + np.arange(count)
    return ids, draw.integers(0, 2, count)


def number(first_token: int) -> int:
    """Which example begins with this token."""
    return int(first_token) - SHARED_TOKENS


def classifier(seed: int, count: int) -> dict[str, np.ndarray]:
    """Weights for toys.Classifier, for `count` examples."""
    draw = generator(seed, 3)
    shapes = {"embedding": (SHARED_TOKENS + count, WIDTH), "gain": (WIDTH,), "frozen": (WIDTH,), "head": (2, WIDTH)}
    weights = {name: draw.normal(scale=0.7, size=shape) for name, shape in (shapes | {"bias": (2,)}).items()}
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


def answer(weights: dict[str, np.ndarray], ids: np.ndarray, right: int) -> np.ndarray:
    """Labels (B,) of which toys.Classifier finds the last `right` for ids (B, T); it finds each class for half of them.

    The bias is shifted for that. Whoever counts right answers otherwise than example by example gets another number.
    """
    hidden = weights["embedding"][ids].mean(axis=1) * weights["gain"] + weights["frozen"]
    scores = hidden @ weights["head"].T + weights["bias"]  # (B, 2)
    margins = scores[:, 1] - scores[:, 0]
    weights["bias"][1] -= np.median(margins)
    found = (margins > np.median(margins)).astype(np.int64)
    found[: len(ids) - right] ^= 1
    return found


def language_model(seed: int, count: int) -> dict[str, np.ndarray]:
    """Weights for toys.LanguageModel, whose first and last layer are one tensor."""
    draw = generator(seed, 4)
    shapes = {"embedding": (SHARED_TOKENS + count, WIDTH), "gain": (WIDTH,), "frozen": (WIDTH,)}
    return {name: draw.normal(scale=0.7, size=shape).astype(np.float32) for name, shape in shapes.items()}
