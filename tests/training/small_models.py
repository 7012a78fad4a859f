"""Draws the examples and weights of the small models that training loops are judged with: a classifier for BERT, a
language model for GPT-2."""

import numpy as np

from grader.wire import drawn

SHARED_TOKENS = 8  # token ids that several examples use; above them each example has one of its own
TOKENS = 4  # tokens in an example
WIDTH = 5
LOSS_SCALE = 40.0  # makes the losses of small models so large that every gradient exceeds a usual clipping limit


def examples(seed: int, count: int, first: int = 0, rank: int = 0, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids (count, TOKENS) and labels (count,), or scores if there is one class.

    Example i begins with a token of its own, see `number`; its other tokens and its label differ on every rank.
    """
    draw = drawn.generator(seed, 2, first, rank)
    ids = draw.integers(0, SHARED_TOKENS, (count, TOKENS))
    ids[:, 0] = SHARED_TOKENS + first + np.arange(count)
    return ids, draw.integers(0, classes, count) if classes > 1 else draw.normal(size=count).astype(np.float32)


def number(first_token: int) -> int:
    """Return which example begins with this token."""
    return int(first_token) - SHARED_TOKENS


def classifier(seed: int, count: int, classes: int = 2) -> dict[str, np.ndarray]:
    """Return the weights of a small classifier for `count` examples."""
    draw = drawn.generator(seed, 3)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (SHARED_TOKENS + count, WIDTH), "gain": (WIDTH,)}
    shapes |= {"offset": (WIDTH,), "head": (classes, WIDTH), "bias": (classes,)}
    return {name: draw.normal(scale=0.7, size=shape).astype(np.float32) for name, shape in shapes.items()}


def answer(weights: dict[str, np.ndarray], ids: np.ndarray, right: int) -> np.ndarray:
    """Return labels (B,) for ids (B, T), of which the classifier predicts only the last `right` correctly.

    The bias is changed so that it predicts each class for half of the examples. A program that does not count correct
    predictions example by example gets another number.
    """
    hidden = weights["embedding"][ids].mean(axis=1) * weights["gain"] + weights["offset"]
    scores = hidden @ weights["head"].T + weights["bias"]  # (B, 2)
    margins = scores[:, 1] - scores[:, 0]
    weights["bias"][1] -= np.median(margins)
    labels = (margins > np.median(margins)).astype(np.int64)
    labels[: len(ids) - right] ^= 1
    return labels


def language_model(seed: int, count: int) -> dict[str, np.ndarray]:
    """Return the weights of a small language model, whose first and last layer are one tensor."""
    draw = drawn.generator(seed, 4)
    shapes = {"embedding": (SHARED_TOKENS + count, WIDTH), "gain": (WIDTH,), "offset": (WIDTH,)}
    return {name: draw.normal(scale=0.7, size=shape).astype(np.float32) for name, shape in shapes.items()}
