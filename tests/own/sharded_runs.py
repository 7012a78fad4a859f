"""Runs the solved lessons on shards on real gloo, and keeps what every rank saw.

    python -m tests.own.sharded_runs FOLDER WORLD_SIZE [WORLD_SIZE ...]

Each scene is a function of (rank, world size, folder) that returns what is kept, as FOLDER/{scene}_{size}_{rank}.pt. A
world size resumes from the checkpoint that the one before it has saved.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from transformers import GPT2LMHeadModel

from beyond.checkpoint import load_shards, save_shards
from beyond.rank_memory import persistent_bytes
from beyond.sharded_model import ShardedModel
from beyond.sharded_optimizer import ShardedOptimizer
from common.models.load import model_path
from common.optim import weight_decay_groups
from tests.own.equal_runs import on_ranks

STAGES = (1, 2, 3)
BATCH = 24  # in all; each of its two micro-batches divides by 1, 2, 3 and 4
STEPS, MICROS = 20, 2
DECAY, NORM = 0.1, 0.5
MAKE = partial(AdamW, lr=1e-4)


def sharded(stage: int, model: nn.Module, blocks: Any, make: Any = MAKE) -> Any:
    if stage == 3:
        return ShardedModel(model, blocks, make, DECAY)
    return ShardedOptimizer(model, blocks, make, DECAY, stage)


def gather(strategy: Any) -> None:
    """Make the parameters of ZeRO-3 readable."""
    for piece in strategy.pieces:
        if isinstance(strategy, ShardedModel):
            piece.wait()


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel.from_pretrained(model_path("tiny", "gpt2")).eval()  # eval: dropout off


def batches(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 500, (BATCH, 8), generator=generator) for _ in range(count)]


def train(model: nn.Module, strategy: Any, stage: int, data: list[torch.Tensor], rank: int, size: int) -> list[float]:
    """The losses of all ranks together: equal to one worker's."""
    losses = []
    for tokens in data:
        total = torch.zeros(())
        for micro, part in enumerate(tokens.chunk(MICROS)):
            loss = model(input_ids=part[rank::size], labels=part[rank::size]).loss / MICROS
            loss.backward()
            total += loss.detach() / size
            if stage > 1 or micro == MICROS - 1:
                strategy.finish()
        strategy.clip(NORM)
        strategy.step()
        strategy.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def trained(rank: int, size: int, folder: Path) -> dict:
    """{stage: (losses, parameters)} of AdamW steps of the tiny GPT-2; rank 0 trains as one worker besides: "single"."""
    found: dict = {}
    for stage in STAGES:
        model = tiny()
        strategy = sharded(stage, model, model.transformer.h)
        losses = train(model, strategy, stage, batches(STEPS, 1), rank, size)
        gather(strategy)
        found[stage] = losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if rank > 0:
        return found
    model, losses = tiny(), []
    optimizer = MAKE(weight_decay_groups(model, DECAY))
    for tokens in batches(STEPS, 1):
        total = 0.0
        for part in tokens.chunk(MICROS):
            loss = model(input_ids=part, labels=part).loss / MICROS
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return found | {"single": (losses, {name: parameter.detach() for name, parameter in model.named_parameters()})}


def resumed(rank: int, size: int, folder: Path) -> dict:
    """{stage: the losses after the checkpoint}; the first world size saves it and goes on, the other one resumes."""
    found = {}
    for stage in STAGES:
        model = tiny()
        strategy = sharded(stage, model, model.transformer.h)
        checkpoint = folder / f"checkpoint{stage}"
        if not (folder / "saved").exists():
            train(model, strategy, stage, batches(4, 2), rank, size)
            save_shards(checkpoint, strategy)
        else:
            load_shards(checkpoint, strategy)
        dist.barrier()
        found[stage] = train(model, strategy, stage, batches(4, 3), rank, size)
    dist.barrier()
    (folder / "saved").touch()
    return found


class Odd(nn.Module):
    """Blocks with a frozen, an unused and a half-precision parameter, one that two blocks share, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[1].weight = self.blocks[0].weight
        self.blocks[1].register_parameter("unused", nn.Parameter(torch.ones(3, 5)))
        self.blocks[2].bias.requires_grad_(False)
        self.narrow = nn.Linear(7, 3).bfloat16()
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.last(hidden).square().mean() + self.narrow(hidden.bfloat16()).float().square().mean()


def momentum(groups: list[dict]) -> Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def odd_steps(rank: int, size: int, folder: Path) -> dict:
    """{stage: parameters, of one worker and sharded, after three steps, and the elements of the optimizer's state}."""
    found = {}
    for stage in STAGES:
        torch.manual_seed(0)
        model, plain = Odd(), Odd()
        plain.load_state_dict(model.state_dict())
        masters = plain.narrow.float()  # the sharded model updates fp32 values, and rounds what it computes with
        optimizer = momentum(weight_decay_groups(plain, DECAY))
        strategy = sharded(stage, model, [*model.blocks, model.narrow], momentum)
        for step in range(3):
            for other in range(size):
                x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + other))
                if other == rank:
                    model(x).backward()
                    strategy.finish()
                (plain_loss(plain, masters, x) / size).backward()
            plain.blocks[1].unused.grad = torch.zeros(3, 5)  # sharded, it counts as zeros, and decays
            strategy.step()
            strategy.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        gather(strategy)
        shards = [piece.shard.values.clone() for piece in strategy.pieces]
        found[stage] = {
            "parameters": {
                name: (mine.detach().clone(), theirs.detach())
                for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
            },
            "dtypes": {shard.dtype for shard in shards},
            "state": sum(state["momentum_buffer"].numel() for state in strategy.optimizer.state.values()),
            "owned": sum(shard.numel() for shard in shards),
        }
    return found


def plain_loss(model: Odd, masters: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Odd's loss with its half-precision layer computed from fp32 values."""
    hidden = model.first(x)
    for block in model.blocks:
        hidden = hidden + torch.tanh(block(hidden))
    rounded = nn.functional.linear(hidden.bfloat16(), masters.weight.bfloat16(), masters.bias.bfloat16())
    return model.last(hidden).square().mean() + rounded.float().square().mean()


def memory(rank: int, size: int, folder: Path) -> dict:
    """{stage: (bytes that stay before zero_grad, bytes of whole parameters after it)}, and the number of parameters."""
    found: dict = {"parameters": sum(parameter.numel() for parameter in tiny().parameters())}
    for stage in STAGES:
        model = tiny()
        strategy = sharded(stage, model, model.transformer.h)
        tokens = batches(1, 1)[0]
        model(input_ids=tokens, labels=tokens).loss.backward()
        strategy.finish()
        strategy.step()
        stays = persistent_bytes(model, strategy.optimizer)
        with torch.no_grad():
            model(input_ids=tokens)
        whole = sum(piece.flat.values.untyped_storage().nbytes() for piece in strategy.pieces)
        found[stage] = (stays, whole)
    return found


SCENES = (trained, resumed, odd_steps, memory)


def keep(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/join{size}", rank=rank, world_size=size)
    for scene in SCENES:
        torch.save(scene(rank, size, folder), folder / f"{scene.__name__}_{size}_{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    model_path("tiny", "gpt2")  # made before several ranks want it
    for size in map(int, sys.argv[2:]):
        on_ranks(size, lambda rank, size=size: keep(rank, size, folder))


if __name__ == "__main__":
    main()
