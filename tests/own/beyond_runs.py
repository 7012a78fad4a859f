"""Runs the solved bonus lessons on real gloo, and keeps what every rank saw.

    python -m tests.own.beyond_runs FOLDER WORLD_SIZE

Each scene below is a function of (rank, world size) that returns what is kept, as FOLDER/{scene}_{size}_{rank}.pt. The
ranks are forked from this process, which has imported everything and computed nothing.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2LMHeadModel

from beyond import ring
from beyond.overlap import GradientReducer
from common.models.load import model_path
from tests.own.forked_ranks import on_ranks

BATCH = 12  # in all; it divides by 1, 2, 3 and 4
STEPS = 8


def drawn(rank: int, length: int) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every order."""
    return torch.randint(-8, 9, (length,), generator=torch.Generator().manual_seed(100 * length + rank)).float()


# --- the ring ---


def ring_shapes(rank: int, size: int) -> dict:
    """A number, a matrix and a transposed one: (ours, gloo's)."""
    tensors = {"number": drawn(rank, 1)[0], "matrix": drawn(rank, 35).view(5, 7)}
    tensors["transposed"] = drawn(rank, 35).view(5, 7).t()
    found = {}
    for name, ours in tensors.items():
        theirs = ours.clone(memory_format=torch.contiguous_format)
        ring.all_reduce(ours)
        dist.all_reduce(theirs)
        found[name] = (ours.clone(), theirs)
    return found


# --- the reducer, on a small model ---


class Odd(nn.Module):
    """A tied, a frozen, an unused and a double-precision parameter, and one that only even ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.frozen = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.unused, self.even, self.wide = nn.Linear(2, 3), nn.Linear(6, 6), nn.Linear(6, 2).double()
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.tied.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, even: bool) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.tied(self.first(x))))
        if even:
            hidden = hidden + self.even(hidden)
        return self.wide(hidden.double()).square().mean() + self.last(hidden).square().mean()


def odd_batch(rank: int, step: int, micro: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10000 * rank + 100 * step + micro))


def odd_steps(rank: int, size: int) -> dict:
    """Three SGD steps, the last two with two micro-batches: gradients of every step, ours and computed by one rank."""
    torch.manual_seed(0)
    model, plain = Odd(), Odd()
    plain.load_state_dict(model.state_dict())
    reducer = GradientReducer(model, bucket_bytes=100)
    found: dict = {"ours": [], "plain": [], "parameters": {}}
    rate = 0.1
    for step in range(3):
        micros = 1 if step == 0 else 2
        for micro in range(micros):
            with reducer.no_sync() if micro < micros - 1 else nullcontext():
                (model(odd_batch(rank, step, micro), rank % 2 == 0) / micros).backward()
        reducer.finish()
        for other in range(size):
            for micro in range(micros):
                (plain(odd_batch(other, step, micro), other % 2 == 0) / micros / size).backward()
        for name, made in (("ours", model), ("plain", plain)):
            found[name].append({n: None if p.grad is None else p.grad.clone() for n, p in made.named_parameters()})
            torch.optim.SGD(made.parameters(), lr=rate).step()
            made.zero_grad(set_to_none=step == 0)  # both ways
    found["parameters"] = {name: dict(made.named_parameters()) for name, made in (("ours", model), ("plain", plain))}
    return found


def ring_means(rank: int, size: int) -> dict:
    """Gradients averaged by the ring, and those that one rank computes."""
    torch.manual_seed(0)
    model, plain = Odd(), Odd()
    plain.load_state_dict(model.state_dict())
    model(odd_batch(rank, 0, 0), True).backward()
    ring.average_gradients(model)
    for other in range(size):
        (plain(odd_batch(other, 0, 0), True) / size).backward()
    return {name: (p.grad, q.grad) for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)}


# --- the reducer, in a second backward and later steps ---


class Chain(nn.Module):
    """Three layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.c(x))).sum()


def second_backward(rank: int, size: int) -> str:
    """Return the message of the error that a second backward before finish() raises; "" if it raises none."""
    model, message = Chain(), ""
    reducer = GradientReducer(model, bucket_bytes=1)
    model(torch.ones(2, 3)).backward()
    try:
        model(torch.ones(2, 3)).backward()
    except RuntimeError as error:
        message = str(error)
    reducer.finish()
    return message


def kept_gradients(rank: int, size: int) -> dict:
    """A gradient kept without clone() for one step: (its values at first, its values a step later, the gradient then).

    The steps are the second and third: at the end of the first one the buckets are made anew.
    """
    torch.manual_seed(0)
    model = Chain()
    reducer = GradientReducer(model)
    kept, at_first = {}, {}
    for step in range(3):
        model(torch.full((2, 3), 1.0 + step)).backward()
        reducer.finish()
        if step == 1:
            kept = {name: parameter.grad for name, parameter in model.named_parameters()}
            at_first = {name: gradient.clone() for name, gradient in kept.items()}
        if step < 2:
            model.zero_grad()
    return {name: (at_first[name], kept[name], p.grad) for name, p in model.named_parameters()}


# --- training ---


def trained(rank: int, size: int) -> dict:
    """{strategy: (losses, parameters)} of AdamW steps of the tiny GPT-2; `single` sees the whole batch."""
    found = {}
    for strategy in ("single", "ring", "overlap") if rank == 0 else ("ring", "overlap"):
        torch.manual_seed(0)
        model = GPT2LMHeadModel.from_pretrained(model_path("tiny", "gpt2")).eval()  # eval: dropout off
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        finish = {"single": lambda: None, "ring": lambda model=model: ring.average_gradients(model)}.get(strategy)
        if finish is None:
            finish = GradientReducer(model, bucket_bytes=2**18).finish
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(STEPS):
            tokens = torch.randint(5, 500, (BATCH, 16), generator=generator)
            tokens = tokens if strategy == "single" else tokens[rank::size]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            finish()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[strategy] = losses, {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


SCENES = (ring_shapes, ring_means, odd_steps, second_backward, kept_gradients, trained)


def keep(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/join{size}", rank=rank, world_size=size)
    for scene in SCENES:
        torch.save(scene(rank, size), folder / f"{scene.__name__}_{size}_{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    model_path("tiny", "gpt2")  # made before several ranks want it
    on_ranks(size, lambda rank: keep(rank, size, folder))


if __name__ == "__main__":
    main()
