"""What every strategy is to the training loop: forward, backward, step, validate, save and load.

engine = STRATEGIES["fsdp"](settings, worker, model)
loss = engine.forward(batch); engine.backward(loss, last=True); engine.step(rate)
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from benchmark.measure.payload import sent
from benchmark.settings import Settings
from common.evaluation import text_metrics
from common.optim import weight_decay_groups
from common.workers.process_group import Worker

# FSDP and DeepSpeed call collectives by their old names; thousands of lines would hide the one that matters.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)

BETAS = (0.9, 0.999)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def optimizer_class(settings: Settings) -> Callable[[list[dict]], Optimizer]:
    """The optimizer of every strategy, for groups of parameters."""
    if settings.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=settings.learning_rate)
    return partial(torch.optim.AdamW, lr=settings.learning_rate, eps=settings.adam_epsilon, betas=BETAS)


def micro_batches(examples: int, stages: int) -> int:
    """Into how many a pipeline cuts these examples: as many as divide them, at most four for each stage."""
    return max(count for count in range(1, min(examples, 4 * stages) + 1) if examples % count == 0)


def validation_sums(logits: Tensor, batch: dict[str, Tensor], kind: str) -> tuple[float, int, int]:
    """Sum of the losses, tokens guessed right, tokens. logits (B, T, V); labels (B, T) with -100 at padding."""
    labels = batch["labels"]
    if kind != "t5":  # each token predicts the next
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    counted = labels != -100
    return loss.item(), int(((logits.argmax(-1) == labels) & counted).sum()), int(counted.sum())


class Engine:
    """A model and AdamW, spread over the workers in some way; `wrap` says how. The rest is that of one worker alone:
    a strategy changes what it does differently, and nothing else."""

    autocasts = True  # half precision by autocast: weights stay fp32, operations choose
    cuts_model = False  # wrap cuts the model and moves the parts to the device, which need not hold the whole model
    shares_examples = False  # all workers compute the examples of all of them
    norm: Tensor | float | None = None  # of the last step's gradient before clipping; None: not clipped, or not known

    def __init__(self, settings: Settings, worker: Worker, model: nn.Module) -> None:
        self.settings, self.worker = settings, worker
        has_memory = not any(parameter.is_meta for parameter in model.parameters())
        self.bare = model.to(worker.device) if has_memory and not self.cuts_model else model  # otherwise wrap does it
        self.model = self.wrap(self.bare)
        if self.cuts_model:
            self.bare = self.model  # the rest goes with the last reference to the whole model
        self.optimizer = self.make_optimizer()
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=settings.precision == "fp16")

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as forward calls it: nn.Module, DistributedDataParallel, ... (B, T) token ids -> .loss, .logits."""
        return model

    def make_optimizer(self) -> Optimizer:
        return optimizer_class(self.settings)(weight_decay_groups(self.model, self.settings.weight_decay))

    def half(self) -> contextlib.AbstractContextManager:
        half = HALF.get(self.settings.precision)
        enabled = half is not None and self.autocasts
        return torch.autocast(self.worker.device.type, dtype=half, enabled=enabled)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.shares_examples:
            batch = {name: self.of_all_workers(value) for name, value in batch.items()}
        with self.half():
            loss: Tensor = self.model(**batch).loss
        return loss

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        """Gradients of a micro-batch; with the `last` one of a step they are averaged over the workers. The loss."""
        self.scaler.scale(loss / self.settings.accumulation).backward()
        return loss.detach()

    def step(self, rate: float) -> None:
        """Clip, update at learning rate `rate`, forget the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.settings.max_grad_norm:
            self.scaler.unscale_(self.optimizer)
            self.norm = self.clip(self.settings.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def clip(self, norm: float) -> Tensor:
        """Scale the gradients so that the norm of all of them is at most `norm`; return it as it was before."""
        return clip_grad_norm_(self.bare.parameters(), norm)

    def validate(self, batches: Iterable[dict[str, Tensor]], kind: str) -> dict[str, float]:
        """Loss, perplexity and accuracy; of a user's own model, loss and metric. All workers take the same batches."""
        self.model.eval()
        total, right, tokens = 0.0, 0, 0
        own: dict[str, list[float]] = {"loss": [], "metric": []}
        with torch.no_grad(), self.half():
            for batch in self.worker.batches(batches):
                output = self.validated()(**batch)
                if kind == "own":
                    for name, values in own.items():
                        if (value := getattr(output, name)) is not None:
                            values.append(float(value))
                    continue
                sums = validation_sums(output.logits, batch, kind)
                total, right, tokens = total + sums[0], right + sums[1], tokens + sums[2]
        self.model.train()
        if kind == "own":
            return {name: sum(values) / len(values) for name, values in own.items() if values}
        return text_metrics(total, right, tokens)

    def validated(self) -> nn.Module:
        return self.model

    def divide_by_accumulation(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the sum of a step's micro-batches their mean, once, where no loss was divided before backward."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= self.settings.accumulation

    def of_all_workers(self, tokens: Tensor) -> Tensor:
        """The tokens (B, T) of every worker, in the order of ranks: (B * workers, T). A collective."""
        everybody = [torch.empty_like(tokens) for _ in range(self.worker.world_size)]
        dist.all_gather(everybody, tokens)
        return torch.cat(everybody)

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters by the model's own names, gathered on the first worker's CPU; {} on the others."""
        return {name: p.detach().cpu() for name, p in self.bare.named_parameters()} if self.worker.is_first else {}

    def copies(self, full: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, what this worker holds, and that part of `full`, for what several workers hold and must agree on."""
        for name, p in self.bare.named_parameters():
            if name in full and p.shape == full[name].shape and not hasattr(p, "to_local"):
                yield name, p.detach().cpu(), full[name]

    def sent_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes in which gradients and parameters are sent."""
        return torch.float32, torch.float32

    def unrecorded_bytes(self) -> float:
        """Bytes a worker sends in a step outside of recorded collectives, rank to rank (mean over the workers)."""
        return 0.0

    def ring_bytes(self) -> float:
        """Bytes a worker sends in an all_reduce of all gradients that the recorder does not see."""
        gradients = (parameter for parameter in self.bare.parameters() if parameter.requires_grad)
        return sent("all_reduce", sum(parameter.nbytes for parameter in gradients), self.worker.world_size)

    def group_sizes(self) -> dict[str, int]:
        """Workers in the engine's own process groups, by the name of the group."""
        return {}

    def save(self, folder: Path) -> None:
        """This worker's part of a checkpoint, into a folder that all workers share."""
        state = {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.worker.is_first or self.cuts_model:  # otherwise all workers hold the same
            torch.save(state | {"scaler": self.scaler.state_dict()}, self.state_file(folder))

    def load(self, folder: Path) -> None:
        # On the CPU: AdamW reads `step` in every step. A part of a model may be of a class that only pickle can load.
        state = torch.load(self.state_file(folder), map_location="cpu", weights_only=not self.cuts_model)
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def state_file(self, folder: Path) -> Path:
        return folder / (f"part{self.worker.rank}.pt" if self.cuts_model else "state.pt")
