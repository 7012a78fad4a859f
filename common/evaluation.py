"""Evaluates a model on the dev set."""

import math

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common.config import GlueConfig
from common.data.glue import GlueData, glue_metrics
from common.record import Record
from common.workers.process_group import Worker


def evaluate(config: GlueConfig, worker: Worker, model: nn.Module, data: GlueData) -> dict[str, float]:
    """Return the task's metrics on the whole dev set, by their short names: {"acc": 0.66}.

    Every rank evaluates the whole set. This function calls no collective itself. But the first forward pass after a
    training step does, if the model is wrapped in DistributedDataParallel: it sends the model's buffers from rank 0.
    Then every rank must take part, or the others wait forever in their next step. The model stays in eval mode, without
    dropout: call model.train() before training.
    """
    model.eval()
    loader = DataLoader(data.dev, batch_size=config.per_gpu_eval_batch_size)
    outputs, labels = [], []
    with torch.no_grad():
        for batch in worker.batches(loader):
            outputs.append(model(**batch).logits.float().cpu())  # (B, classes)
            labels.append(batch["labels"].cpu())  # (B,)
    return glue_metrics(data.task, np.concatenate(outputs), np.concatenate(labels))


def evaluate_only(config: GlueConfig, worker: Worker, model: nn.Module, data: GlueData, record: Record) -> None:
    """Evaluate the loaded model without training it, as epoch 0 (--do_eval without --do_train)."""
    record.evaluation(-1, evaluate(config, worker, model, data))


def evaluate_text(worker: Worker, model: nn.Module, blocks: Dataset, batch_size: int = 16) -> dict[str, float]:
    """Return the mean loss per token, its exponential, and the share of correctly predicted tokens."""
    model.eval()
    total_loss, right, tokens = 0.0, 0, 0
    with torch.no_grad():
        for ids in worker.batches(DataLoader(blocks, batch_size=batch_size)):  # (B, T)
            sums = text_sums(model(input_ids=ids).logits, ids)
            total_loss, right, tokens = total_loss + sums[0], right + sums[1], tokens + sums[2]
    return text_metrics(total_loss, right, tokens)


def text_sums(logits: torch.Tensor, ids: torch.Tensor) -> tuple[float, int, int]:
    """Return, for logits (B, T, V) of token ids (B, T): the sum of the losses, the hits, and the number of tokens."""
    logits = logits[:, :-1].float()  # (B, T-1, V): the last token has no successor
    targets = ids[:, 1:]  # (B, T-1)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return loss, int((logits.argmax(-1) == targets).sum()), targets.numel()


def text_metrics(total_loss: float, right: int, tokens: int) -> dict[str, float]:
    """Return the means of the sums of text_sums; {} without tokens."""
    if tokens == 0:
        return {}
    loss = total_loss / tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": right / tokens}
