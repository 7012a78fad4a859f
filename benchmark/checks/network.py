"""Bytes and times on emulated nodes, beside what the lessons' formulas say.

    python -m benchmark.checks.network [--parts tiny,large,rate] [--nodes 2,4] [--steps 10] [--quick]

tiny     traffic of an epoch of task 4's script, observed over expected with framing: batch 64, 32, 16 (0.99 to 1.01)
large    the same with 102 MB of gradients, 3 iterations (payload alone: 0.995 to 1.005)
rate     a 32 MiB all_reduce at 100 Mbit/s and 1 Gbit/s, and gather + scatter beside it: times, and bytes over b.15's

--steps makes `tiny` short; --quick takes small models and 2 nodes, and judges no times. Where a machine cannot emulate
nodes, the reason is said. The last line of stdout is one JSON object; exit code 0 only if all bounds hold.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.checks.ranks import check_nodes, on_ranks
from benchmark.measure.machine import interface_bytes
from benchmark.names import numbers_of
from cluster.demo.random_bert import random_bert
from cluster.emulate import on_nodes
from cluster.launch import run_silently
from common.config import RunConfig
from common.errors import exit_on_input_error
from task4_traffic.compare import ratios, read_run

SCRIPT = "task4_traffic/run_glue.py"
BATCHES = [64, 32, 16]
WIRE_LIMITS = {2: 0.92, 4: 0.87}  # least share of the configured rate, by nodes
COLLECTIVE_TIME = 0.15  # gather + scatter takes nodes times as long as all_reduce, within this
FRAMING = {"100mbit": 1.05, "1gbit": 1.0}  # bytes over payload: a link below some 260 Mbit/s cuts packets
REPEATS = 3


def tiny(flags: argparse.Namespace) -> list[Row]:
    """Traffic of an epoch of the tiny model."""
    batches, allowed = (BATCHES[:1], 0.1) if flags.quick else (BATCHES, 0.01)
    rows = [row for n in flags.nodes for batch in batches for row in observe(n, batch, "", flags.steps)]
    return [row | {"holds": abs(row["framed_ratio"] - 1) <= allowed} for row in rows]


def large(flags: argparse.Namespace) -> list[Row]:
    """Traffic of an iteration of a model with large tensors."""
    # In a few iterations of a small model the barriers around them have a share of the bytes, too.
    model, ratio, allowed = ("1M", "framed_ratio", 0.1) if flags.quick else ("25M", "payload_ratio", 0.005)
    rows = [row for n in flags.nodes for row in observe(n, 4 * n, model, 3)]
    return [row | {"holds": abs(row[ratio] - 1) <= allowed} for row in rows]


def observe(nodes: int, batch: int, model: str, steps: int) -> list[Row]:
    """Run task 4's script on emulated nodes, and compare what the interface saw with what it expects.

    model: one of cluster/demo/random_bert.py, or "" for the tiny one. batch: of all workers together.
    """
    check_nodes()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--do_train", "--num_train_epochs", "1", "--max_steps", str(steps), "--output_dir", folder]
        words += ["--overwrite_output_dir", "--per_gpu_train_batch_size", str(batch // nodes)]
        words += ["--model_name_or_path", str(random_bert(model))] if model else []
        run_silently(SCRIPT, on_nodes(nodes, "1gbit", [sys.executable, SCRIPT, *words]))
        runs = [read_run(Path(folder), rank) for rank in (0, 1)]
    rows = []
    for run in runs:
        times = 1 if model else run.steps_per_epoch
        row: Row = {"nodes": nodes, "batch": batch, "rank": run.rank, "iterations": run.counted}
        row |= {name: round(times * getattr(run, name).sent) for name in ("expected", "framing", "observed")}
        row["payload_ratio"], row["framed_ratio"] = ratios(run)
        rows.append(row)
    return rows


def time_operations(config: RunConfig, size: int) -> dict[str, tuple[float, float]]:
    """Return, of each operation on `size` bytes, the shortest seconds, and the bytes out of this rank's interface.

    A barrier follows each operation: it ends when the slowest rank has ended it, and the last bytes have left.
    """
    tensor = torch.ones(size // 4)
    # Made before: the first touch of so much memory takes time that is not the network's.
    room = [torch.ones_like(tensor) for _ in range(config.world_size)] if config.rank == 0 else None

    def gather_and_scatter() -> None:  # as task 2a moves one gradient; the mean itself costs no byte
        dist.gather(tensor, room, dst=0)
        dist.scatter(tensor, room, src=0)

    figures = {}
    for name, operation in (("all_reduce", partial(dist.all_reduce, tensor)), ("gather + scatter", gather_and_scatter)):
        operation()  # makes connections
        dist.barrier()
        seconds, before = [], interface_bytes() or 0
        for _ in range(REPEATS):
            begin = time.perf_counter()
            operation()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        figures[name] = (min(seconds), ((interface_bytes() or 0) - before) / REPEATS)
    return figures


def rate(flags: argparse.Namespace) -> list[Row]:
    """An all_reduce and a gather + scatter at two rates, out of rank 0. wire: bytes over time and rate."""
    size = 2**20 if flags.quick else 2**25
    rows = []
    for n in flags.nodes:
        for name, bits in (("100mbit", 1e8), ("1gbit", 1e9)):
            (seconds, sent), (other, other_sent) = on_ranks(time_operations, n, name, size=size)[0].values()
            row: Row = {"nodes": n, "rate": name, "MiB": size >> 20, "all_reduce_s": seconds, "gather_scatter_s": other}
            row |= {"wire": 8 * sent / seconds / bits, "ratio": other / seconds}
            row |= {"payload_ratio": sent * n / (2 * (n - 1) * size), "gather_ratio": other_sent / ((n - 1) * size)}
            row["holds"] = all(
                abs(row[ratio] / FRAMING[name] - 1) < 0.02 for ratio in ("payload_ratio", "gather_ratio")
            )
            if not flags.quick:
                row["holds"] &= row["wire"] >= WIRE_LIMITS.get(n, 0) and abs(row["ratio"] / n - 1) <= COLLECTIVE_TIME
            rows.append(row)
    return rows


def main() -> None:
    parser = check_parser("checks.network", __doc__)
    parser.add_argument("--nodes", type=partial(numbers_of, "--nodes"), default="2,4", help="numbers of nodes (2,4)")
    parser.add_argument("--steps", type=int, default=0, help="iterations of each run of `tiny` (0: an epoch)")
    run_parts(parser, {"tiny": tiny, "large": large, "rate": rate}, nodes=[2], steps=3)


if __name__ == "__main__":
    exit_on_input_error(main)
