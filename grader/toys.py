"""Two models small enough to be checked by hand, called like BERT and like GPT-2; they tell what they are shown.

Shapes: B examples, T tokens, D width, V vocabulary, C classes. Imported in ranks only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

Watch = Callable[..., None]


class Toy(nn.Module):
    """Parameters by name, one of them frozen; every forward pass is told to `watch`."""

    embedding: nn.Parameter  # (V, D)
    gain: nn.Parameter  # (D,)
    frozen: nn.Parameter  # (D,)
    head: nn.Parameter  # (C, D)
    bias: nn.Parameter  # (C,)

    def __init__(self, weights: dict[str, torch.Tensor], watch: Watch) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone(), requires_grad=name != "frozen"))
        self.watch = watch

    def seen(self, ids: torch.Tensor) -> None:
        """Which examples (by their first token), in which mode."""
        first = ids[:, 0].tolist()
        self.watch("forward", first=first, training=self.training, grad=torch.is_grad_enabled())


class Classifier(Toy):
    """logits = (mean of the embeddings * gain + frozen) head^T + bias."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, labels: Any = None
    ):
        self.seen(input_ids)
        pooled = self.embedding[input_ids].mean(dim=1)  # (B, T, D) -> (B, D)
        logits = (pooled * self.gain + self.frozen) @ self.head.T + self.bias  # (B, C)
        loss = None if labels is None else cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class LanguageModel(Toy):
    """logits = (embedding * gain + frozen) embedding^T: the first and the last layer are tied, as GPT-2's are."""

    def __init__(self, weights: dict[str, torch.Tensor], watch: Watch) -> None:
        super().__init__(weights, watch)
        self.lm_head = self.embedding

    def forward(self, input_ids: Any = None, labels: Any = None, attention_mask: Any = None):
        self.seen(input_ids)
        hidden = self.embedding[input_ids] * self.gain + self.frozen  # (B, T, D)
        logits = hidden @ self.lm_head.T  # (B, T, V)
        loss = None
        if labels is not None:  # the model shifts the labels by one token
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
