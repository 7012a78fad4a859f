"""Runs the solved lessons on shards on real gloo, and keeps what every rank saw.

    python -m tests.own.sharded_runs FOLDER WORLD_SIZE OTHER_WORLD_SIZE

Each scene is a function of (rank, world size, folder) that returns what is kept, as FOLDER/{scene}_{size}_{rank}.pt.
The other world size resumes from the checkpoint of the scene `trained`, and runs no other scene.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

from beyond.checkpoint import load_shards, save_shards
from beyond.deferred import from_folder, from_random
from beyond.rank_memory import persistent_bytes
from beyond.sharded_model import ShardedModel
from beyond.sharded_optimizer import ShardedOptimizer
from common.models.load import model_path
from common.optim import weight_decay_groups
from tests.own.forked_ranks import on_ranks

STAGES = (1, 2, 3)
BATCH = 24  # in all; each of its two micro-batches divides by 1, 2, 3 and 4
STEPS, MICROS = 3, 2
DECAY, NORM = 10.0, 0.5  # so much that its loss shows after a few small steps
MAKE = partial(AdamW, lr=1e-4)


def sharded(stage: int, model: GPT2LMHeadModel) -> Any:
    if stage == 3:
        return ShardedModel(model, model.transformer.h, MAKE, DECAY)
    return ShardedOptimizer(model, model.transformer.h, MAKE, DECAY, stage)


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


def train(
    model: nn.Module, strategy: Any, stage: int, data: list[torch.Tensor], rank: int, size: int
) -> tuple[list[float], int]:
    """The losses of all ranks together, equal to one worker's, and the bytes that stay before zero_grad."""
    losses, held_bytes = [], 0
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
        held_bytes = persistent_bytes(model, strategy.optimizer)
        strategy.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, held_bytes


def trained(rank: int, size: int, folder: Path) -> dict:
    """{stage: losses, parameters, bytes} of AdamW steps of the tiny GPT-2; on rank 0 also of one worker, "single".

    The first world size saves a checkpoint half way, from which the other one resumes.
    """
    results: dict = {}
    resumes = (folder / "checkpoint1").exists()
    dist.barrier()
    for stage in STAGES:
        model, losses = tiny(), []
        strategy = sharded(stage, model)
        if resumes:
            load_shards(folder / f"checkpoint{stage}", strategy)
        else:
            losses, _ = train(model, strategy, stage, batches(STEPS, 1), rank, size)
            save_shards(folder / f"checkpoint{stage}", strategy)
        later, held_bytes = train(model, strategy, stage, batches(STEPS, 2), rank, size)
        gather(strategy)
        results[stage] = {"losses": losses + later, "parameters": copies(model), "bytes": held_bytes}
    if rank == 0:
        model = tiny()
        losses = train_alone(model, batches(STEPS, 1) + batches(STEPS, 2))
        results["single"] = {"losses": losses, "parameters": copies(model)}
    return results


def train_alone(model: nn.Module, data: list[torch.Tensor]) -> list[float]:
    """The losses of one worker without a strategy."""
    losses = []
    optimizer = MAKE(weight_decay_groups(model, DECAY))
    for tokens in data:
        total = 0.0
        for part in tokens.chunk(MICROS):
            loss = model(input_ids=part, labels=part).loss / MICROS
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def small_gpt2() -> GPT2LMHeadModel:
    """A GPT-2 of many blocks, none of which is large."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=16, n_embd=64, n_layer=6, n_head=4, eos_token_id=1))


def deferred(rank: int, size: int, folder: Path) -> dict:
    """{"random", "saved": results} of a model built without memory; on rank 0 also those that it must equal, "single".

    Results are the parameters, the losses of the steps and the next random number; also the peak of the bytes that
    torch has allocated while the model is built and sharded, and in "single" the bytes of the whole model.
    """
    device, results = torch.device("cpu"), dict[str, dict]()
    builds: dict[str, Any] = {
        "random": (partial(from_random, small_gpt2, device), small_gpt2),
        "saved": (
            partial(from_folder, GPT2LMHeadModel, str(folder / "model"), device),
            partial(GPT2LMHeadModel.from_pretrained, folder / "model"),
        ),
    }
    for name, (build, build_at_once) in builds.items():
        torch.manual_seed(7)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            model = build().eval()
            strategy = sharded(3, model)
        trace = folder / f"trace_{size}_{rank}.json"
        profiled.export_chrome_trace(str(trace))
        results[name] = state_of(model, strategy) | {"peak": peak_of_allocations(trace)}
        results[name]["losses"], _ = train(model, strategy, 3, batches(STEPS, 1), rank, size)
        if rank == 0:
            torch.manual_seed(7)
            model = build_at_once().eval()
            single = state_of(model) | {"bytes": sum(parameter.nbytes for parameter in model.parameters())}
            results[name]["single"] = single | {"losses": train_alone(model, batches(STEPS, 1))}
    return results


def state_of(model: nn.Module, strategy: Any = None) -> dict[str, Any]:
    """Copies of a model's parameters, and the next random number."""
    drawn = torch.rand(())
    if strategy:
        gather(strategy)
    parameters = copies(model)
    for piece in strategy.pieces if strategy else []:
        piece.free()
    return {"parameters": parameters, "drawn": drawn}


def peak_of_allocations(trace: Path) -> int:
    """The most that was allocated at once, as torch's profiler saw it."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    sizes = accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"]))
    return max(sizes)


SCENES = (trained, deferred)


def keep(scenes: Sequence[Callable], rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/join{size}", rank=rank, world_size=size)
    for scene in scenes:
        torch.save(scene(rank, size, folder), folder / f"{scene.__name__}_{size}_{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    folder, first, other = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model_path("tiny", "gpt2")  # made before several ranks want it
    torch.manual_seed(5)
    small_gpt2().save_pretrained(folder / "model", max_shard_size="1MB")
    on_ranks(first, lambda rank: keep(SCENES, rank, first, folder))
    on_ranks(other, lambda rank: keep([trained], rank, other, folder))


if __name__ == "__main__":
    main()
