"""The rows of benchmark.checks.timings whose steps are those of real ranks."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from benchmark.checks.timed_rows import Timed, lesson
from benchmark.measure.turns import Step
from common.config import RunConfig
from common.workers.process_group import Worker
from common.workers.pulse import Pulse, Thread
from common.workers.watchdog import Watchdog


def ladder(config: RunConfig, worker: Worker, quick: bool) -> Timed:
    """One step of each strategy of the ladder, and its ratio to a step of DDP."""
    width, layers, vocabulary, examples, tokens = (64, 2, 1273, 16, 64) if quick else (384, 6, 30522, 2, 32)
    shape = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(5, 1000, (examples, tokens)), "labels": torch.zeros(examples).long()}
    plain = BertForSequenceClassification(shape)
    tasks = [lesson("task2a_gather_scatter"), lesson("task2b_allreduce")]

    def step_of(model: nn.Module, sync: Step) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            worker.pulse.beat()
            model(**batch).loss.backward()
            sync()
            optimizer.step()
            model.zero_grad()

        return step

    def flat() -> None:
        """One message instead of one for every parameter."""
        gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
        whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(whole)
        pieces = (whole / worker.world_size).split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, pieces, strict=True):
            gradient.copy_(mean.view_as(gradient))

    ddp = [step_of(DistributedDataParallel(BertForSequenceClassification(shape)), lambda: None) for _ in range(2)]
    return Timed(
        {
            "3 DDP": ddp[0],
            "3 DDP again": ddp[1],
            "no communication": step_of(plain, lambda: None),
            "2a gather + scatter": step_of(plain, lambda: tasks[0].sync_gradients(plain, worker.world_size)),
            "2b all_reduce": step_of(plain, lambda: tasks[1].sync_gradients(plain, worker.world_size)),
            "2b one flat tensor": step_of(plain, flat),
        },
        {"3 DDP again": (0.95, 1.05)},
    )


def watchdog(config: RunConfig, worker: Worker, quick: bool) -> Timed:
    """Steps with one all_reduce per parameter; with the watchdog's thread and store, and the notes of a step."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=1273, hidden_size=64, num_hidden_layers=2,
                                                     num_attention_heads=4, intermediate_size=256))  # fmt: skip
    batch = {"input_ids": torch.ones(16, 64).long(), "labels": torch.zeros(16).long()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sync, threads = lesson("task2b_allreduce").sync_gradients, list[float]()

    def block(watched: bool) -> None:
        pulse = Pulse()
        guard = Watchdog(config, pulse, worker.collectives) if watched else None
        thread = Thread(guard.thread_ident) if guard else None
        begin = store_seconds() + ((thread.cpu_seconds or 0.0) if thread else 0.0)
        for _ in range(3 if quick else 20):
            worker.pulse.beat()
            if watched:
                pulse.beat()
                for _ in range(4):
                    pulse.phase = "forward"
                    pulse.phase = ""
            model(**batch).loss.backward()
            sync(model, worker.world_size)
            optimizer.step()
            optimizer.zero_grad()
        if guard and thread:
            threads.append(store_seconds() + (thread.cpu_seconds or 0.0) - begin)
            guard.close()

    def shares(seconds: np.ndarray) -> dict[str, float]:
        return {"thread and store, of a step": sum(threads[-len(seconds) :]) / float(seconds[:, 1].sum())}

    steps = {"without": lambda: block(False), "watched": lambda: block(True)}
    return Timed(steps, {"thread and store, of a step": (0.0, 0.005)}, time.process_time, shares=shares)


def store_seconds() -> float:
    """CPU seconds of the threads that serve the ranks' stores in this process (Linux)."""
    threads = [task for task in Path("/proc/self/task").glob("*") if "tcpstore" in (task / "comm").read_text()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e9


IN_RANKS: dict[str, Callable[[RunConfig, Worker, bool], Timed]] = {"ladder": ladder, "watchdog": watchdog}
