"""The optimizer of BERT and GPT-2: AdamW without decay of biases and LayerNorm, with linear warm-up and decay."""

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import get_linear_schedule_with_warmup

from common.config import RunConfig
from common.errors import InputError


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Return the steps that the run takes: --max_steps if it is set, otherwise those of all epochs."""
    return config.max_steps or _steps_of_all_epochs(config, steps_per_epoch)


def schedule_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Return the step at which the learning rate reaches 0: the last of all epochs, or that of a larger --max_steps.

    A run that --max_steps stops early has the learning rates, and so the losses, of the first steps of the whole run.
    """
    return max(config.max_steps, _steps_of_all_epochs(config, steps_per_epoch))


def _steps_of_all_epochs(config: RunConfig, steps_per_epoch: int) -> int:
    return steps_per_epoch * config.num_train_epochs  # type: ignore[attr-defined]


def number_of_epochs(config: RunConfig, steps_per_epoch: int) -> int:
    """Return the number of epochs that the run begins; with --max_steps, the last one may be cut short."""
    return -(-total_steps(config, steps_per_epoch) // steps_per_epoch)


def build_optimizer(config: RunConfig, model: nn.Module, steps_per_epoch: int) -> tuple[AdamW, LambdaLR]:
    """Return AdamW and its schedule. `steps_per_epoch` is the number of batches of this worker's loader.

    The learning rate rises linearly over --warmup_steps, then falls linearly to 0 at the last step of all epochs
    (Devlin et al., BERT, 2019). --max_steps does not change it.
    """
    groups = weight_decay_groups(model, config.weight_decay)
    optimizer = AdamW(groups, lr=config.learning_rate, eps=config.adam_epsilon)
    return optimizer, build_schedule(config, optimizer, steps_per_epoch)


def build_schedule(config: RunConfig, optimizer: Optimizer, steps_per_epoch: int) -> LambdaLR:
    """Return the schedule of build_optimizer for an existing optimizer."""
    total, warmup = schedule_steps(config, steps_per_epoch), config.warmup_steps
    if warmup and warmup >= total:
        raise InputError(f"--warmup_steps: expected fewer than the schedule's {total} steps, got {warmup}")
    return get_linear_schedule_with_warmup(optimizer, warmup, total)


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the trainable parameters in two groups: weights decay; biases and LayerNorm (one-dimensional) do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    kept = [parameter for parameter in trainable if parameter.dim() < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def set_seed(seed: int) -> None:
    """Seed all generators.

    The scripts call it twice. Before the model is made, every worker has the same seed, and so the same weights. After
    that, each worker has seed + rank: with one seed, dropout would drop the same units on every worker.
    """
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # GPUs too
