"""GPT-2 on a grid of ranks: cut into stages and slices, with gradients averaged over the ranks that hold the same part.

This code is given. Each rank does what its place on the grid says:

    pipeline axis    its stage's blocks only, in the order of one_f_one_b or gpipe    one_f_one_b.py, stage_runner.py
    tensor axis      its slices of each block's matrices                              tensor_parallel.py
    data axis        its part of the batch; gradients are averaged after backward     below

Shapes: B examples in the batch of one rank of the data axis, T tokens in an example, V tokens in the vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2LMHeadModel

from beyond.dropout import OwnHeads
from beyond.grid import make_groups
from beyond.one_f_one_b import gpipe, one_f_one_b
from beyond.stage_runner import Stage, StageRunner
from beyond.tensor_parallel import shard_block, squared_norm
from common.config import Grid
from common.errors import InputError
from common.evaluation import text_metrics, text_sums
from common.optim import weight_decay_groups
from common.workers.process_group import Worker

SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe}


class OnGrid:
    """This rank's part of a model, its optimizer, and what a step needs.

    model: the whole model, the same on all ranks. Only this rank's part is kept; do not use the model afterwards.
    grid: see grid.py; its number of ranks must be that of the process group.
    schedule: "1f1b" or "gpipe". micro_batches: pieces of a batch; 1 is enough without a pipeline.

    Attributes
    model: this rank's stage. optimizer: the torch optimizer that updates this stage's parameters.
    """

    def __init__(
        self,
        model: GPT2LMHeadModel,
        grid: Grid,
        make_optimizer: Callable[[list[dict]], Optimizer],
        weight_decay: float,
        schedule: str = "1f1b",
        micro_batches: int = 1,
    ) -> None:
        groups = make_groups(grid)
        self.data, self.tensor, self.pipeline = groups.data, groups.tensor, groups.pipeline
        if grid.tensor > 1:
            own_heads = OwnHeads(model.device)
            for block in model.transformer.h:
                shard_block(block, self.tensor)
                own_heads.draw_for(block.attn)
        stage = dist.get_rank(self.pipeline)
        self.model = Stage(model, stage, grid.pipeline)
        self.runner = StageRunner(self.model, self.pipeline)
        self.actions = SCHEDULES[schedule](micro_batches, grid.pipeline, stage)
        self.micro_batches = micro_batches
        self.optimizer = make_optimizer(weight_decay_groups(self.model, weight_decay))

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """Compute the gradients of a batch (B, T), and return its loss, on every stage.

        B must be divisible by the number of micro-batches. The schedule mixes forward and backward.
        """
        if len(tokens) % self.micro_batches:
            micro_batches = f"a multiple of the {self.micro_batches} micro-batches"
            raise InputError(f"--batch_size: expected {micro_batches}, got {len(tokens)} examples")
        loss = self.runner.run(self.actions, tokens.chunk(self.micro_batches))
        dist.all_reduce(loss, group=self.pipeline)  # 0 except on the last stage
        return loss

    def finish(self) -> None:
        """Average the gradients over the ranks that hold the same part of the model."""
        self.runner.finish()
        if dist.get_world_size(self.data) == 1:
            return
        gradients = self.gradients()
        message = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(message, group=self.data)
        message /= dist.get_world_size(self.data)
        for gradient, mean in zip(gradients, message.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's part."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the whole model's gradient is at most max_norm; return that norm."""
        total = squared_norm(self.model, self.tensor)
        counted_elsewhere = self.runner.shared_elsewhere()
        if counted_elsewhere is not None and counted_elsewhere.grad is not None:
            total = total - counted_elsewhere.grad.square().sum()
        dist.all_reduce(total, group=self.pipeline)
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in self.gradients():
            gradient *= factor
        return norm

    def step(self) -> None:
        """Update this rank's parameters."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients, before the next step."""
        self.optimizer.zero_grad()

    def evaluate(self, worker: Worker, blocks: Dataset, batch_size: int = 16) -> dict[str, float]:
        """Return the metrics of common.evaluation.evaluate_text, on every rank."""
        sums = torch.zeros(3, dtype=torch.float64, device=worker.device)
        with self.evaluating():
            for tokens in worker.batches(DataLoader(blocks, batch_size=batch_size)):  # (B, T)
                logits = self.runner.only_forward(tokens)  # (B, T, V), on the last stage
                if logits is not None:
                    sums += torch.tensor(text_sums(logits, tokens), dtype=sums.dtype, device=sums.device)
        dist.all_reduce(sums, group=self.pipeline)
        total_loss, right, count = sums.tolist()
        return text_metrics(total_loss, int(right), int(count))

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Switch dropout and gradients off inside the block."""
        self.model.eval()
        with torch.no_grad():
            yield self.model
        self.model.train()
