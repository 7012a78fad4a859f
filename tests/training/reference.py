"""Computes the right values in numpy: losses and gradients of the models in loop_in_rank.py, and clipping.

Shapes: B examples, T tokens, D width, V vocabulary, C classes.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from grader import arithmetic
from tests.training.small_models import LOSS_SCALE

Arrays = dict[str, np.ndarray]


def classifier(weights: Mapping[str, np.ndarray], ids: np.ndarray, labels: np.ndarray) -> tuple[float, Arrays]:
    """Return loss and gradients of Classifier for ids (B, T) and labels (B,), or scores if there is one class."""
    w = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    pooled = w["embedding"][ids].mean(axis=1)  # (B, D)
    hidden = pooled * w["gain"] + w["offset"]
    logits = hidden @ w["head"].T + w["bias"]
    loss, error = (_squared_error if logits.shape[1] == 1 else _cross_entropy)(logits, labels)  # error: (B, C)
    back = error @ w["head"]  # (B, D)
    embedding = np.zeros_like(w["embedding"])
    np.add.at(embedding, ids, (back * w["gain"])[:, None, :] / ids.shape[1])
    gain = (back * pooled).sum(axis=0)
    return loss, {"embedding": embedding, "gain": gain, "head": error.T @ hidden, "bias": error.sum(axis=0)}


def logits(weights: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Return what Classifier gives for ids (B, T): (B, C)."""
    hidden = weights["embedding"][ids].mean(axis=1) * weights["gain"] + weights["offset"]
    return hidden @ weights["head"].T + weights["bias"]


def language_model(
    weights: Mapping[str, np.ndarray], ids: np.ndarray, first: float = 1.0, last: float = 1.0
) -> tuple[float, Arrays]:
    """Return loss and gradients of LanguageModel for ids (B, T), each token the label of the one before.

    first, last: the parts that the first and the last layer have in the gradient of the embedding.
    """
    w = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    inputs, targets = ids[:, :-1].ravel(), ids[:, 1:].ravel()  # (B * (T-1),)
    before = w["embedding"][inputs]
    hidden = before * w["gain"] + w["offset"]
    loss, error = _cross_entropy(hidden @ w["embedding"].T, targets)
    back = error @ w["embedding"]
    embedding = last * error.T @ hidden
    np.add.at(embedding, inputs, first * back * w["gain"])
    return loss, {"embedding": embedding, "gain": (back * before).sum(axis=0)}


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the loss, LOSS_SCALE times the mean over examples, and its gradient with respect to the logits."""
    logits = logits - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(probabilities[rows, labels]).mean()
    probabilities[rows, labels] -= 1
    return LOSS_SCALE * float(loss), LOSS_SCALE * probabilities / len(labels)


def _squared_error(logits: np.ndarray, scores: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the same for regression; logits (B, 1)."""
    error = logits[:, 0] - scores
    return LOSS_SCALE * float(np.mean(error**2)), LOSS_SCALE * 2 * error[:, None] / len(scores)


def mean(per_rank: Sequence[Arrays]) -> Arrays:
    """Return the mean over ranks, name by name."""
    return {name: np.asarray(np.mean([arrays[name] for arrays in per_rank], axis=0)) for name in per_rank[0]}


def norm(arrays: Mapping[str, np.ndarray]) -> float:
    """Return the norm of all arrays together."""
    return arithmetic.norm(list(arrays.values()))


def clipped(arrays: Arrays, limit: float) -> Arrays:
    """Scale all arrays down together to the norm `limit`, as clip_grad_norm_ does; 0 leaves them as they are."""
    factor = min(1.0, limit / (norm(arrays) + 1e-6)) if limit else 1.0
    return {name: array * factor for name, array in arrays.items()}
