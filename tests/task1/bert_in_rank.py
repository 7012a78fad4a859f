"""A pretrained BERT of a few hundred weights; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertModel


def save_tiny_bert(context: Any) -> BertModel:
    """Save a BERT without a head, as checkpoints are, in ./pretrained. Arguments: checkpoint_seed, vocabulary."""
    torch.manual_seed(context.arguments["checkpoint_seed"])
    config = BertConfig(
        vocab_size=context.arguments["vocabulary"], hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    model = BertModel(config)
    for weight in model.parameters():  # none left at 0 or 1, where loaded and new weights would look alike
        torch.nn.init.normal_(weight.data, std=0.5)
    model.save_pretrained("pretrained")
    torch.manual_seed(0)
    return model
