"""Measure what a prediction starts from: how long a worker computes, latency and bandwidth of a link over loopback.

The link's two numbers are those with which b.15's formula gives the measured times of a small and a large all_reduce.
"""

import argparse
import os
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.checks.ranks import on_ranks
from benchmark.engines.single import Single
from benchmark.measure.turns import Turn, take_rounds_alone
from benchmark.predicted_step import Costs, PredictedCell
from benchmark.training.workload import load_workload
from beyond.cost_model import Link
from common.config import RunConfig
from common.workers.machine import own_cores
from common.workers.process_group import Worker

WARM_UP, ROUNDS = 2, 11
SMALL, LARGE = 4096, 2**23  # bytes of an all_reduce
PAYLOAD = 0.95  # of a link's bytes: the rest are the headers of TCP, IP and Ethernet
MOST_RANKS = 4  # that are started to measure


def costs_of(cell: PredictedCell, flags: argparse.Namespace) -> Costs:
    """Return the costs for a cell: measured here, but for what the flags say."""
    cores = len(own_cores())
    ranks = 1 if flags.cores else min(cell.workers, max(2, min(cores, MOST_RANKS)))
    measured = {"latency": 0.0, "bandwidth": float("inf")}  # where loopback is not measured, it takes no time
    if flags.forward_backward is None or (cell.workers > 1 and None in (flags.rate, flags.latency)):
        if flags.cores:
            os.environ["OMP_NUM_THREADS"] = str(flags.cores)
        measured |= on_ranks(measure, ranks, model=cell.model, examples=cell.batch, length=cell.length)[0]
    slower = 1.0 if flags.cores else max(1.0, cell.workers / cores) / max(1.0, ranks / cores)  # than for these ranks
    latency, bandwidth = measured["latency"] * slower, measured["bandwidth"] / slower
    busy = 1.0
    if flags.rate is not None:  # the rest of a message's time is the link's
        bandwidth, busy = min(flags.rate / 8 * PAYLOAD, bandwidth), min(1.0, flags.rate / 8 * PAYLOAD / bandwidth)
    link = Link(latency if flags.latency is None else flags.latency, bandwidth)
    if flags.forward_backward is not None:
        return Costs(flags.forward_backward, 0.0, link, busy)
    return Costs(measured["forward_backward"] * slower, measured["optimizer"] * slower, link, busy)


def measure(config: RunConfig, model: str, examples: int, length: int) -> dict[str, float]:
    """On one of some ranks that all compute the whole model, each alone, and send, in turns: the medians, in seconds.

    forward_backward, optimizer: for so many examples. latency, bandwidth: of two ranks or more.
    """
    words = ["--model", model, "--batch_size", str(examples), "--length", str(length), "--no_cuda", "--workers", "1"]
    alone, _ = parse([*words, "--strategies", "single"])
    worker, workload = Worker(config.rank, config.world_size), load_workload(alone)
    engine, batches = Single(alone, worker, workload.build(alone)), workload.batches(alone)

    def forward_backward() -> None:
        engine.backward(engine.forward(next(batches)), last=True)

    def step() -> None:
        forward_backward()
        engine.step(alone.learning_rate)

    messages = [partial(dist.all_reduce, torch.ones(size // 4)) for size in (SMALL, LARGE)]
    turns: list[Turn] = [lambda _, action=action: action for action in (forward_backward, step, *messages)]  # type: ignore[misc]
    medians = np.median(take_rounds_alone(turns, ROUNDS, WARM_UP, seed=0, meet=dist.barrier)[WARM_UP:], axis=0)
    computing, whole, small, large = medians.tolist()
    figures = {"forward_backward": computing, "optimizer": max(0.0, whole - computing)}
    ranks, rounds = config.world_size, 2 * (config.world_size - 1)
    if ranks == 1:
        return figures
    # b.15's formula, rounds * (latency + size / ranks / bandwidth), solved for its two unknowns.
    per_byte = max(large - small, 1e-9) / (rounds * (LARGE - SMALL) / ranks)
    return figures | {"latency": max(0.0, small / rounds - per_byte * SMALL / ranks), "bandwidth": 1 / per_byte}
