"""GPT-2's blocks over the workers as a pipeline: pipeline/distributed.py behind the benchmark's Engine.

All workers together are one replica: a step's examples are the same as with the other strategies, and travel through
the stages as micro-batches. Forward and backward are interleaved by the schedule, so both count as backward.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GPT2LMHeadModel

from benchmark.engines.engine import Engine, micro_batches, optimizer_class
from benchmark.settings import Settings
from common.errors import InputError
from common.optim import weight_decay_groups
from common.workers.process_group import Worker
from pipeline.distributed import PipelinedProcesses
from pipeline.model_parallel import GPT2LMHeadModelParallel


class Pipeline(Engine):
    """One stage on each worker, schedule 1F1B; as many micro-batches as examples of a worker, at most four a stage."""

    cuts_model = True

    def __init__(self, settings: Settings, worker: Worker, model: GPT2LMHeadModel) -> None:
        parallel = GPT2LMHeadModelParallel(model.config)
        parallel.load_state_dict(model.state_dict())
        parallel.train()
        self.config = model.config
        self.total = settings.batch_size * worker.world_size
        chunks = micro_batches(self.total, worker.world_size)
        if chunks < worker.world_size:
            raise InputError(
                f"--batch_size: a pipeline of {worker.world_size} stages needs at least {worker.world_size} "
                f"micro-batches per step, got {chunks}; use a larger batch"
            )
        self.processes = PipelinedProcesses(parallel, "1f1b", chunks, worker.device)
        self.parts = nn.ModuleList([self.processes.schedule._stage.submod])  # type: ignore[union-attr]
        super().__init__(settings, worker, parallel)
        names = {id(p): n for n, p in self.bare.named_parameters()}
        self.own = {names[id(p)]: p for p in self.processes.parameters}
        self.model = self.bare = self.parts  # the other stages go with the last reference to the whole model

    def make_optimizer(self) -> Optimizer:
        return optimizer_class(self.settings)(weight_decay_groups(self.parts, self.settings.weight_decay))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Gathers the workers' examples: stage 0 reads all of them, the last one needs all labels."""
        self.tokens = self.of_all_workers(batch["input_ids"])  # (B * workers, T)
        return self.tokens

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        result = self.processes.forward_backward(self.tokens)
        if last:
            self.divide_by_accumulation(self.processes.parameters)
        return result

    def clip(self, norm: float) -> Tensor:
        """As PipelinedProcesses.clip_gradients, which does not return the norm: the shared matrix counts once."""
        processes, rank = self.processes, self.worker.rank
        counted = [p for p in processes.parameters if p.grad is not None and (p is not processes.shared or rank == 0)]
        squares = [0.0] * self.worker.world_size
        dist.all_gather_object(squares, sum(torch.linalg.vector_norm(p.grad).item() ** 2 for p in counted))
        total = torch.tensor(sum(squares)).sqrt()
        nn.utils.clip_grads_with_norm_(processes.parameters, norm, total)
        return total

    def validate(self, batches: Iterable[dict[str, Tensor]], kind: str) -> dict[str, float]:
        """By the first worker, on the whole model put together; the others wait at their next collective."""
        full = self.full_parameters()
        if not self.worker.is_first:
            return {}
        self.model = GPT2LMHeadModelParallel(self.config)
        self.model.load_state_dict(full, strict=False)  # lm_head.weight is wte.weight
        self.model.to(self.worker.device)  # type: ignore[arg-type]
        return super().validate(batches, kind)

    def full_parameters(self) -> dict[str, Tensor]:
        """Each worker sends what it trains to the first."""
        own_part = {name: p.detach().cpu() for name, p in self.own.items()}
        parts = [own_part] * self.worker.world_size if self.worker.is_first else []
        dist.gather_object(own_part, parts if self.worker.is_first else None)
        together: dict[str, Tensor] = {}
        for part in reversed(parts):
            together |= part
        return together

    def unrecorded_bytes(self) -> float:
        """gloo's point to point: activations to the next stage, their gradients back, the shared matrix's gradient."""
        width, world = self.config.n_embd, self.worker.world_size
        boundary = 2 * self.tokens.numel() * width * 4 * (world - 1)
        shared = 2 * self.processes.shared.numel() * 4 if world > 1 else 0
        return (boundary + shared) * self.settings.accumulation / world
