"""What a validation adds up, and what it says in the end."""

import math

from torch import Tensor, nn


def validation_sums(logits: Tensor, batch: dict[str, Tensor], kind: str) -> tuple[float, int, int]:
    """Sum of the losses, tokens guessed right, tokens. logits (B, T, V); labels (B, T) with -100 at padding."""
    labels = batch["labels"]
    if kind == "gpt2":  # each token predicts the next
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    counted = labels != -100
    return loss.item(), int(((logits.argmax(-1) == labels) & counted).sum()), int(counted.sum())


def summary(total: float, right: int, tokens: int) -> dict[str, float]:
    """Loss per token, perplexity and next-token accuracy; nothing where there was nothing to validate on."""
    if not tokens:
        return {}
    return {"loss": total / tokens, "perplexity": math.exp(min(total / tokens, 700)), "accuracy": right / tokens}
