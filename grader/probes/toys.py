"""Two models small enough to be checked by hand, built and called like BERT and like GPT-2; they tell what they see.

Shapes: B examples, T tokens, D width, V vocabulary, C classes. Imported in ranks only.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

from grader.wire.drawn import LOSS_SCALE

Tell = Callable[..., None]
Weights = dict[str, torch.Tensor]


def by_name(parameters: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters by the names of draws, however deep in wrappers they lie; what is no toy's is left out."""
    return {parameter.drawn_as: parameter for parameter in parameters if hasattr(parameter, "drawn_as")}


def _drawn(weights: Weights, name: str) -> nn.Parameter:
    parameter = nn.Parameter(weights[name].clone())
    parameter.drawn_as = name  # type: ignore[attr-defined]
    return parameter


class Body(nn.Module):
    """Where BERT and GPT-2 have their layers: embedding * gain + offset."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        vocabulary, width = weights["embedding"].shape
        self.embedding = nn.Embedding(vocabulary, width, device="meta")
        self.embedding.weight = _drawn(weights, "embedding")  # (V, D)
        self.gain = _drawn(weights, "gain")  # (D,)
        self.offset = weights["offset"].clone()  # (D,), no parameter: who forgets to look for None loses one test

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids) * self.gain + self.offset.to(self.gain.dtype)  # (B, T) -> (B, T, D)


def _head(weights: Weights) -> nn.Linear:
    """(B, D) -> (B, C)"""
    classes, width = weights["head"].shape
    linear = nn.Linear(width, classes, device="meta")
    linear.weight, linear.bias = _drawn(weights, "head"), _drawn(weights, "bias")
    return linear


class Toy(nn.Module):
    """Calls `tell` for every forward pass."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self.tell = tell

    def seen(self, ids: torch.Tensor) -> None:
        """Which examples (by their first token), in which mode, and the random number that dropout would draw."""
        first = ids[:, 0].tolist()
        noise = torch.rand((), dtype=torch.float64).item() if self.training else None
        self.tell("forward", first=first, training=self.training, grad=torch.is_grad_enabled(), noise=noise)


def watch_backward(loss: torch.Tensor, parameters: Iterable[torch.Tensor], tell: Tell) -> None:
    """Tell of a backward pass that goes through this loss and stores gradients, as torch.autograd.grad does not.

    No object leads to a hook on a node of the graph, unlike one on a tensor, so that nobody can hang it elsewhere.
    """
    passes: list[bool] = []

    def stores(gradients: object) -> None:
        if passes:
            passes.clear()
            tell("backward")

    trained = next((parameter for parameter in parameters if parameter.requires_grad), None)
    if loss.grad_fn is not None and trained is not None:
        loss.grad_fn.register_prehook(lambda gradients: passes.append(True))
        torch.autograd.graph.get_gradient_edge(trained).node.register_prehook(stores)


class Classifier(Toy):
    """logits = (mean of the embeddings * gain + offset) head^T + bias; one class: a score, as BERT for STS-B."""

    def __init__(self, weights: Weights, tell: Tell) -> None:
        super().__init__(tell)
        self.bert = Body(weights)
        self.classifier = _head(weights)

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, labels: Any = None
    ):
        self.seen(input_ids)
        pooled = self.bert(input_ids).mean(dim=1)  # (B, T, D) -> (B, D)
        logits = self.classifier(pooled)  # (B, C)
        loss = None
        if labels is not None:
            loss = mse_loss(logits[:, 0], labels) if logits.shape[1] == 1 else cross_entropy(logits, labels)
            loss = LOSS_SCALE * loss
            watch_backward(loss, self.parameters(), self.tell)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class LanguageModel(Toy):
    """logits = (embedding * gain + offset) embedding^T: the first and the last layer are tied, as GPT-2's are."""

    def __init__(self, weights: Weights, tell: Tell) -> None:
        super().__init__(tell)
        self.transformer = Body(weights)
        vocabulary, width = weights["embedding"].shape
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.embedding.weight

    def forward(self, input_ids: Any = None, labels: Any = None, attention_mask: Any = None):
        self.seen(input_ids)
        logits = self.lm_head(self.transformer(input_ids))  # (B, T, D) -> (B, T, V)
        loss = None
        if labels is not None:  # the model shifts the labels by one token
            loss = LOSS_SCALE * cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
