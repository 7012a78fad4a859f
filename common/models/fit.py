"""Adapts a loaded model to the run: its vocabulary, its dropout, the length of its input."""

from typing import TYPE_CHECKING

from torch import nn

from common.config import RunConfig
from common.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fit_model(model: "PreTrainedModel", config: RunConfig, tokenizer, length: int) -> "PreTrainedModel":
    """Return the model with rows for every token of `tokenizer` and with --dropout. Raises InputError if T is too long.

    Rows are added if --tokenizer_name has a larger vocabulary than the saved model.
    """
    positions = model.config.max_position_embeddings
    if length > positions:
        raise InputError(
            f"{length} tokens exceed the model's {positions} positions; lower --max_seq_length (or --model_max_length)"
        )
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if config.dropout is not None:
        set_dropout(model, config.dropout)
    return leave_file(model)


def leave_file(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return the model with parameters in memory of their own: loaded ones are in a mapping of the whole file.

    A parameter that is cut or replaced could not give its memory back otherwise.
    """
    for loaded in model.parameters():
        if not loaded.is_meta:
            loaded.data = loaded.data.clone()
    return model


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set all dropout probabilities of the model; with 0, runs on different numbers of workers can be compared."""
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(model.config, name):  # type: ignore[attr-defined]
            setattr(model.config, name, probability)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
