"""The benchmark's engines on fake GPUs: each scene is two steps and a validation of first and last rank."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmark.strategies import STRATEGIES
from common.workers.process_group import Worker
from tests.own.gpu.fake_gpu import fake_gpu, joined


def engine(folder: Path, strategy: str, world_size: int = 2, precision: str = "fp32") -> None:
    settings = SimpleNamespace(
        strategy=strategy, precision=precision, learning_rate=1e-4, adam_epsilon=1e-8, weight_decay=0.1, accumulation=2,
        max_grad_norm=1.0, batch_size=4, world_size=world_size, grid="pipeline=2,tensor=2", bucket_mb=4.0,
        optimizer="adamw",
    )  # fmt: skip
    for rank in (0, world_size - 1):
        with fake_gpu(1), joined(rank, world_size):
            worker = Worker(rank, world_size, torch.device("cuda", 0))  # each on a node of its own
            model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=99, n_positions=8))
            tested = STRATEGIES[strategy].make(settings, worker, model)  # type: ignore[arg-type]
            tokens = torch.ones(4, 8, dtype=torch.long)
            for _ in range(2):
                for last, batch in enumerate(worker.batches([{"input_ids": tokens, "labels": tokens}] * 2)):
                    tested.backward(tested.forward(batch), last=bool(last))
                tested.step(1e-4)
            tested.validate([{"input_ids": tokens, "labels": tokens}], "gpt2")


# Not own_tensor, since a fake matrix that embedding and head share cannot move twice; own_grid has its axis, too.
LESSONS = ("own_ring", "own_overlap", "own_zero1", "own_zero2", "own_zero3", "own_1f1b")
SCENES = {
    "single": partial(engine, strategy="single", world_size=1),
    "fp16": partial(engine, strategy="single", world_size=1, precision="fp16"),
    **{name: partial(engine, strategy=name) for name in LESSONS},
    "own_grid": partial(engine, strategy="own_grid", world_size=4),
}
