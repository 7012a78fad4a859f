"""The same pipeline with one process per stage. torch.distributed.pipelining runs the schedule; this file cuts GPT-2.

    python -m cluster.launch --workers 2 -- pipeline/run_gpt2.py --schedule gpipe|1f1b|interleaved

One process per stage (two stages each when interleaved), gloo between CPUs or NCCL between GPUs. The processes share
no interpreter lock, but activations travel through sockets. gpipe is the schedule of pipe.py. 1f1b starts each backward
as early as it can and so keeps fewer micro-batches in memory. interleaved gives each process several short stages,
which makes the bubble smaller and the traffic larger.

Letters: B batch, T tokens, D hidden size, V vocabulary, M micro-batches.
"""

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

from common.errors import InputError
from pipeline.model_parallel import GPT2LMHeadModelParallel

STAGES_PER_PROCESS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


def join_pipeline(master_ip: str, master_port: int, world_size: int, rank: int, backend: str) -> None:
    """Join the other processes of the pipeline; return when all of them have joined."""
    places = {"MASTER_ADDR": master_ip, "MASTER_PORT": master_port, "WORLD_SIZE": world_size, "RANK": rank}
    os.environ.update({name: str(value) for name, value in places.items()})
    init_device_mesh("cuda" if backend == "nccl" else "cpu", (world_size,))  # joins the group that they describe


def make_schedule(
    name: str, modules: Sequence[nn.Module], n_micro_batches: int, loss: Callable, device: torch.device
) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B:
    """Return torch's schedule over all processes.

    `modules` are the stages of this process: rank, rank + world_size, ...
    The schedule's step() runs forward and backward; gradients are those of the sum of the micro-batches' losses.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = world_size * len(modules)
    stages = [PipelineStage(module, rank + i * world_size, count, device) for i, module in enumerate(modules)]
    if name == "interleaved":
        return ScheduleInterleaved1F1B([*stages], n_micro_batches, loss, scale_grads=False)
    kind: type[ScheduleGPipe] | type[Schedule1F1B] = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    return kind(stages[0], n_micro_batches, loss, scale_grads=False)


class GPT2Embedding(nn.Module):
    """Tokens (B, T) to hidden states (B, T, D): what GPT-2 does before its first block."""

    def __init__(self, model: GPT2LMHeadModelParallel) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.transformer.wte, model.transformer.wpe, model.transformer.drop

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))


def gpt2_stage(model: GPT2LMHeadModelParallel, index: int, count: int) -> nn.Sequential:
    """Return one of `count` stages: some blocks; the first stage also has the embedding, the last has ln_f and head."""
    blocks = model.transformer.h
    if count > len(blocks):
        raise InputError(f"expected at most {len(blocks)} stages for {len(blocks)} blocks, got {count}")
    layers = [block for i, block in enumerate(blocks) if i * count // len(blocks) == index]
    before = [GPT2Embedding(model)] if index == 0 else []
    after = [model.transformer.ln_f, model.lm_head] if index == count - 1 else []
    return nn.Sequential(*before, *layers, *after)


class PipelinedProcesses:
    """This process's part of a GPT-2 that is spread over all processes.

    `.parameters` are those that this process trains. The shared matrix of embedding and head is in the first and in the
    last process: both start with the same values and get the same gradient, so both copies stay equal.
    """

    def __init__(self, model: GPT2LMHeadModelParallel, schedule: str, n_micro_batches: int, device: torch.device):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        here = STAGES_PER_PROCESS[schedule]
        if here > 1 and self.world_size == 1:
            raise InputError("expected 2 or more workers for --schedule interleaved, got 1")
        count = here * self.world_size
        stages = [gpt2_stage(model, self.rank + i * self.world_size, count).to(device) for i in range(here)]
        self.parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
        self.shared = model.transformer.wte.weight
        self.n_micro_batches, self.device = n_micro_batches, device

        def loss(logits: Tensor, tokens: Tensor) -> Tensor:  # each token predicts the next
            prediction = logits[:, :-1].flatten(0, 1)  # (B * (T - 1), V)
            return cross_entropy(prediction, tokens[:, 1:].flatten()) / n_micro_batches

        self.schedule = make_schedule(schedule, stages, n_micro_batches, loss, device)

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """Run one batch (B, T) forward and backward through all processes; return the loss, on every process.

        Raises InputError if B is not divisible by the number of micro-batches: the library needs equal micro-batches.
        """
        if len(tokens) % self.n_micro_batches:
            expected = f"expected a multiple of {self.n_micro_batches} (--n_chunk)"
            raise InputError(f"--batch_size: {expected}, got {len(tokens)}")
        losses: list[Tensor] = []
        tokens, last = tokens.to(self.device), self.world_size - 1
        inputs = (tokens,) if self.rank == 0 else ()
        before, self.shared.grad = self.shared.grad, None  # what is exchanged below is this batch's gradient alone
        self.schedule.step(*inputs, target=tokens if self.rank == last else None, losses=losses, return_outputs=False)
        if last > 0 and self.rank in (0, last):
            self._add_shared_gradients(other=last - self.rank)
        if before is not None and self.shared.grad is not None:
            self.shared.grad += before
        total = torch.stack(losses).sum() if self.rank == last else torch.zeros((), device=self.device)
        dist.broadcast(total, src=last)
        return total

    def _add_shared_gradients(self, other: int) -> None:
        """Give the shared matrix the sum of the embedding's and the head's gradient, on both processes."""
        gradient = self.shared.grad
        assert gradient is not None
        other_gradient = torch.empty_like(gradient)
        exchange = [dist.P2POp(dist.isend, gradient.contiguous(), other), dist.P2POp(dist.irecv, other_gradient, other)]
        for request in dist.batch_isend_irecv(exchange):
            request.wait()
        gradient.add_(other_gradient)

    def clip_gradients(self, _all: object, max_norm: float) -> None:
        """Clip by the norm of the whole model's gradient. No process sees all of it, so all add up their squares."""
        counted = [p for p in self.parameters if p.grad is not None and (p is not self.shared or self.rank == 0)]
        norms = torch.stack([torch.linalg.vector_norm(p.grad) for p in counted])
        own_square = sum(norm**2 for norm in norms.tolist())  # one wait for a GPU, not one for each parameter
        squares = [0.0] * self.world_size
        dist.all_gather_object(squares, own_square)
        norm = torch.tensor(sum(squares)).sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
