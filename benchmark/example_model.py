"""A model that this repository does not know, to be compared and proved: four LSTM layers that predict the next symbol.

python -m benchmark.prove --model benchmark/example_model.py:build --strategies ddp,fsdp,zero2
"""

import torch
from torch import Tensor, nn

SYMBOLS, WIDTH, LAYERS, EXAMPLES, LENGTH = 64, 32, 4, 64, 12


class Lstm(nn.Module):
    """Four LSTM layers; the matrix of the embedding also gives the output (tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(LAYERS)])

    def forward(self, symbols: Tensor) -> Tensor:
        values = self.embedding(symbols)  # (B, T, WIDTH)
        for layer in self.layers:
            values = layer(values)[0]
        return values @ self.embedding.weight.T  # (B, T, SYMBOLS)


def next_symbol_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["symbols"][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["symbols"][:, 1:].flatten())


def metric(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the share of symbols that the model predicts."""
    predicted = model(batch["symbols"][:, :-1]).argmax(-1)
    return (predicted == batch["symbols"][:, 1:]).float().mean()


def build() -> tuple[nn.Module, dict[str, Tensor], object]:
    return Lstm(), {"symbols": torch.randint(SYMBOLS, (EXAMPLES, LENGTH))}, next_symbol_loss
