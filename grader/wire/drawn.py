"""Inputs that are drawn anew for every run: alike in a rank and in the test process, from the same numbers."""

import numpy as np

SHARED_TOKENS = 8  # token ids that several examples use; above them each example has one of its own
TOKENS = 4  # tokens in an example
WIDTH = 5
LOSS_SCALE = (
    40.0  # the losses of small models are made so large that every gradient is longer than any usual limit of clipping
)

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


def examples(seed: int, count: int, first: int = 0, rank: int = 0, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (count, TOKENS) and labels (count,), scores if there is one class.

    Example i begins with a token of its own, see `number`; its other tokens and its label differ on every rank.
    """
    draw = generator(seed, 2, first, rank)
    ids = draw.integers(0, SHARED_TOKENS, (count, TOKENS))
    ids[:, 0] = SHARED_TOKENS + first + np.arange(count)
    return ids, draw.integers(0, classes, count) if classes > 1 else draw.normal(size=count).astype(np.float32)


def number(first_token: int) -> int:
    """Which example begins with this token."""
    return int(first_token) - SHARED_TOKENS


def classifier(seed: int, count: int, classes: int = 2) -> dict[str, np.ndarray]:
    """Return the weights of a small classifier for `count` examples."""
    draw = generator(seed, 3)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (SHARED_TOKENS + count, WIDTH), "gain": (WIDTH,)}
    shapes |= {"offset": (WIDTH,), "head": (classes, WIDTH), "bias": (classes,)}
    return {name: draw.normal(scale=0.7, size=shape).astype(np.float32) for name, shape in shapes.items()}


def answer(weights: dict[str, np.ndarray], ids: np.ndarray, right: int) -> np.ndarray:
    """Labels (B,) of which that classifier finds the last `right` for ids (B, T); it finds each class for half of them.

    The bias is shifted for that. Whoever counts right answers otherwise than example by example gets another number.
    """
    hidden = weights["embedding"][ids].mean(axis=1) * weights["gain"] + weights["offset"]
    scores = hidden @ weights["head"].T + weights["bias"]  # (B, 2)
    margins = scores[:, 1] - scores[:, 0]
    weights["bias"][1] -= np.median(margins)
    found = (margins > np.median(margins)).astype(np.int64)
    found[: len(ids) - right] ^= 1
    return found


def language_model(seed: int, count: int) -> dict[str, np.ndarray]:
    """Return the weights of a small language model, whose first and last layer are one tensor."""
    draw = generator(seed, 4)
    shapes = {"embedding": (SHARED_TOKENS + count, WIDTH), "gain": (WIDTH,), "offset": (WIDTH,)}
    return {name: draw.normal(scale=0.7, size=shape).astype(np.float32) for name, shape in shapes.items()}
