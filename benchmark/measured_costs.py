"""Measure what a prediction starts from: how long a worker computes, latency and bandwidth of a link over loopback.

The link's two numbers are those with which b.15's formula gives the measured times of a small and a large all_reduce.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.engines.single import Single
from benchmark.measure.turns import take_rounds
from benchmark.settings import Settings
from benchmark.training.workload import load_workload
from benchmark.workers import join, start_workers
from common.errors import exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group

WARM_UP, STEPS = 3, 12
SMALL, LARGE, ROUNDS = 4096, 2**23, 15  # bytes of an all_reduce; how often
FILE = "costs.json"


def measure(model: str, workers: int, examples: int, length: int) -> dict[str, float]:
    """Start workers on this machine that all compute the whole model; return what the first one measured.

    forward_backward, optimizer: seconds for so many examples. latency, bandwidth: of two workers or more.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model", model, "--batch_size", str(examples), "--length", str(length), "--no_cuda"]
        words += ["--output_dir", folder, "--overwrite_output_dir"]
        if code := start_workers("benchmark.measured_costs", workers, words):
            sys.exit(code)
        return json.loads((Path(folder) / FILE).read_text())  # type: ignore[no-any-return]


def work(settings: Settings) -> None:
    """One worker; the first one keeps the figures."""
    with process_group(settings, join) as worker:
        figures = step_seconds(settings, worker)
        if worker.world_size > 1:
            figures |= link_figures(worker.world_size)
        if worker.is_first:
            with atomic_write(settings.output_dir / FILE) as file:
                json.dump(figures, file)


def step_seconds(settings: Settings, worker: Worker) -> dict[str, float]:
    """Take steps of the whole model on this worker alone; return the medians. All workers begin each step together."""
    alone, workload = replace(settings, strategy="single", world_size=1, rank=0), load_workload(settings)
    engine, batches = Single(alone, worker, workload.build(alone)), worker.batches(workload.batches(alone))
    steps = []
    for _ in range(STEPS):
        worker.pulse.beat()
        batch = next(batches)
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(engine.forward(batch), last=True)
        middle = time.perf_counter()
        engine.step(settings.learning_rate)
        steps.append((middle - begin, time.perf_counter() - middle))
    forward_backward, optimizer = np.median(steps[WARM_UP:], axis=0).tolist()
    return {"forward_backward": forward_backward, "optimizer": optimizer}


def link_figures(workers: int) -> dict[str, float]:
    """Solve b.15's formula, rounds * (latency + size / workers / bandwidth), for its two unknowns."""
    rounds, sizes = 2 * (workers - 1), (SMALL, LARGE)
    calls = [partial(dist.all_reduce, torch.ones(size // 4)) for size in sizes]
    small, large = np.median(take_rounds(calls, ROUNDS, WARM_UP, dist.barrier), axis=0).tolist()
    per_byte = max(large - small, 1e-9) / (rounds * (LARGE - SMALL) / workers)
    return {"latency": max(0.0, small / rounds - per_byte * SMALL / workers), "bandwidth": 1 / per_byte}


if __name__ == "__main__":
    exit_on_input_error(lambda: work(parse(sys.argv[1:], "measured_costs", __doc__, lambda parser: None)[0]))
