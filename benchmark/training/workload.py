"""What is trained: GPT-2 or Llama on OSCAR text, T5 on translation pairs, or a user's own model on its own examples."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset, default_collate

from benchmark.names import is_own
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES
from benchmark.training.model_config import KINDS, model_config
from benchmark.training.own_model import blocks, build_own
from benchmark.training.translation import Pairs, load_pairs
from beyond.deferred import from_folder, from_random
from common.data.oscar import read_blocks
from common.data.sample_data import oscar_sample_file
from common.errors import InputError
from common.models.fit import leave_file, set_dropout
from common.models.load import load_tokenizer
from common.optim import set_seed

Batch = dict[str, Tensor]


class T5ForConditionalGeneration(transformers.T5ForConditionalGeneration):
    """T5 whose losses have the mean over all target tokens of a step, though workers have different numbers of them.

    A saved model names its class, so this one is called as the original.
    """

    def forward(self, *args: Any, step_lengths: Tensor | None = None, **batch: Any) -> Any:
        """step_lengths (B, examples of the step): in each row, the target tokens of all examples of the step.

        Strategies take the mean over workers and micro-batches, so the loss is multiplied by the batch's target tokens
        per example, in units of the step's. Without step_lengths it is the mean over the batch's own target tokens.
        """
        output = super().forward(*args, **batch)
        if step_lengths is not None:
            counted = batch["labels"] != -100
            output.loss = output.loss * (counted.sum() / len(counted) / step_lengths[0].float().mean())
        return output


@dataclass(frozen=True)
class Workload:
    """A model's configuration and its data. Items are dicts of tensors (T,); `model(**batch).loss` is the loss."""

    kind: str  # "gpt2", "llama", "t5" or "own"
    source: str | None  # a folder to load weights from; None: random weights
    config: Any  # of "own": the name FILE.py:NAME
    tokenizer: Any
    train: Dataset
    validation: Dataset

    def build(self, settings: Settings, device: torch.device | None = None) -> nn.Module:
        """A fresh model, the same on every worker and for every strategy with the same seed.

        With a device, that of own_zero3 and fsdp has no memory: the engine gives it some (beyond/deferred.py).
        """
        set_seed(settings.seed)
        model: Any = build_own(self.config)[0] if self.kind == "own" else self._transformer(settings, device)
        if settings.dropout is not None:
            set_dropout(model, settings.dropout)
            for module in model.modules():
                for name in ("dropout", "attention_dropout"):  # numbers of T5's attention and LSTMs, and of Llama's
                    if isinstance(getattr(module, name, None), float):
                        setattr(module, name, settings.dropout)
        if settings.compile:  # forward alone: what engines hang on a block's call, such as gathering it, stays outside
            for module in blocks(model) or [model]:
                module.forward = torch.compile(module.forward, backend=settings.compile)
        model.train()
        return model  # type: ignore[no-any-return]

    def _transformer(self, settings: Settings, device: torch.device | None) -> nn.Module:
        model_class = T5ForConditionalGeneration if self.kind == "t5" else KINDS[self.kind]
        model: Any = None
        if device and STRATEGIES[settings.strategy].is_deferred:  # without memory
            folder, random = self.source, lambda: model_class(self.config)
            model = from_folder(model_class, folder, device) if folder else from_random(random, device)
        if model is None:
            model = leave_file(model_class.from_pretrained(self.source)) if self.source else model_class(self.config)
        model.config.use_cache = False
        if settings.recompute:
            with warnings.catch_warnings():  # the newest transformers have another name for it
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    def batches(self, settings: Settings, first_step: int = 0) -> Iterator[Batch]:
        """This worker's batches from `first_step` on, without end: `accumulation` of them for each step.

        The examples of a step, over all workers, are the next ones of a shuffled order that does not depend on the
        number of workers; a part of an epoch that does not fill a step is left out.
        """
        size, world, per_step = settings.batch_size, settings.world_size, settings.examples_per_step
        count = len(self.train)  # type: ignore[arg-type]
        steps = count // per_step
        if not steps:
            raise InputError(
                f"expected at least {per_step} training examples for one step, got {count}; "
                "use fewer workers or a smaller --batch_size"
            )
        epoch, order = -1, torch.empty(0)
        step = first_step
        while True:
            if step // steps != epoch:
                epoch = step // steps
                generator = torch.Generator().manual_seed(settings.seed + epoch)
                order = torch.randperm(count, generator=generator)
            here = order[step % steps * per_step :][:per_step]
            more = {}
            if isinstance(self.train, Pairs):
                more["step_lengths"] = torch.tensor(self.train.target_lengths(here.tolist())).repeat(size, 1)
            for micro in here.view(settings.accumulation, world, size)[:, settings.rank].tolist():
                yield default_collate([self.train[i] for i in micro]) | more
            step += 1

    def validation_batches(self, settings: Settings) -> Iterator[Batch]:
        """The first --eval_batches batches of the validation set: the same on every worker.

        What does not fill the examples of a step is left out. So if a step's examples are divided among the workers,
        and --eval_batches grows with their number, any number of workers validates on the same examples.
        """
        size, count = settings.batch_size, len(self.validation)  # type: ignore[arg-type]
        count = count - count % settings.examples_per_step or count
        for begin in range(0, min(count, settings.eval_batches * size) - size + 1, size):
            yield default_collate([self.validation[i] for i in range(begin, begin + size)])


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on a GPU, copied from pinned memory: the copy need not wait for the GPU. On a CPU, as they are."""
    for batch in batches:
        if device.type == "cuda":
            batch = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
        yield batch


def load_workload(settings: Settings) -> Workload:
    """Data and configuration for --model; raises InputError if there is no such model or no usable data."""
    name = settings.model
    if is_own(name):
        set_seed(settings.seed)  # the examples may be drawn, too
        examples = build_own(name)[1]
        return Workload("own", None, name, None, examples, examples)
    kind, folder, config = model_config(name)
    tokenizer = load_tokenizer(settings.tokenizer_name or folder or "tiny", "t5" if kind == "t5" else "gpt2")
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"--tokenizer_name: the tokenizer has {len(tokenizer)} tokens, but the vocabulary of {name} has "
            f"{config.vocab_size}; choose the model's own tokenizer"
        )
    train: Dataset
    validation: Dataset
    if kind != "t5":  # each token predicts the next: the model shifts the labels
        if settings.length > config.max_position_embeddings:
            raise InputError(
                f"--length: expected at most {config.max_position_embeddings} tokens for {name}, got {settings.length}"
            )
        data = read_blocks(settings.data_dir or oscar_sample_file(), tokenizer, settings.length)
        train, validation = (StackDataset(input_ids=part, labels=part) for part in (data.train, data.validation))
    else:
        train, validation = load_pairs(settings.data_dir, tokenizer, settings.length)
    return Workload(kind, folder, config, tokenizer, train, validation)


def what_is_trained(settings: Settings) -> str:
    """Say it in the head of a table; of a user's model also how many blocks FSDP and ZeRO-3 gather one by one."""
    what = f"{settings.model}, {settings.world_size} workers, {settings.batch_size} "
    if not is_own(settings.model):
        return f"{what}x {settings.length} tokens each"
    return f"{what}examples each, {len(blocks(build_own(settings.model)[0]))} blocks"
