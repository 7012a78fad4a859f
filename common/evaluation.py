"""How good the model is on the dev set."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from common.arguments import GlueConfig
from common.glue import GlueData, glue_metrics
from common.process_group import Worker
from common.record import Record


def evaluate(config: GlueConfig, worker: Worker, model: nn.Module, data: GlueData) -> dict[str, float]:
    """The task's metrics on the whole dev set, by their short names: {"acc": 0.66}.

    Every worker evaluates all of it and none waits for another: there is no collective in here. Leaves the model in
    eval mode, without dropout; training goes on with model.train().
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
    """What --do_eval without --do_train does: the metrics of the model as it was loaded, as epoch 0."""
    record.evaluation(-1, evaluate(config, worker, model, data))
