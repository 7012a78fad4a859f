"""Bytes and times on emulated nodes, beside what the lessons' formulas say.

    python -m benchmark.checks.network [--parts tiny,large,rate,delay] [--nodes 2,4] [--steps 10] [--quick]

tiny     traffic of an epoch of task 4's script, observed over expected with framing: batch 64, 32, 16 (0.99 to 1.01)
large    the same with 102 MB of gradients, 3 iterations, and as many bytes gathered and scattered (payload alone: 0.995
         to 1.005)
rate     a 32 MiB all_reduce at 100 Mbit/s and 1 Gbit/s, and gather + scatter beside it
delay    gather, scatter and all_reduce of 1,000 numbers on links with a delay of 10 ms, over b.15's times (0.9 to 1.1)

The latency that b.15 needs is measured with two ranks and as many numbers. `message`: all ranks begin at the same
time. Gloo's receiver first says that it is ready, so this takes a round trip. `answer` is half of there and back: the
receiver has been waiting already, so this takes one way. gather and scatter, timed apart, and the rounds of all_reduce
begin at the same time on all ranks. In task 2a one follows the other: there the receivers wait already. 4 kB are little
beside the delay, so the bandwidth is left out. Where a machine can make no such links, the reason is said.

--steps makes `tiny` short; --quick runs every part on 2 nodes with small models, and judges no times. The last line of
stdout is one JSON object; exit code 0 only if all bounds hold.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.checks.operations import operations, time_operations
from benchmark.checks.ranks import check_nodes, on_ranks
from benchmark.checks.transfers import slowest
from benchmark.names import numbers_of
from beyond.cost_model import Link, gather_scatter_seconds, ring_all_reduce_seconds
from cluster.emulate import on_nodes
from cluster.launch import run_silently
from cluster.random_bert import random_bert
from common.config import RunConfig
from common.errors import exit_on_input_error
from task4_traffic.compare import ratios, read_run
from task4_traffic.expected import gather_scatter_traffic

SCRIPT = "task4_traffic/run_glue.py"
BATCHES = [64, 32, 16]
WIRE_LIMITS = {2: 0.92, 4: 0.87}  # least share of the configured rate, by nodes
NUMBERS, DELAY_MS, ROUNDS, SECONDS = 1000, 10.0, 15, 3.0  # of the part `delay`
BOUND = 0.1  # of its times
COLLECTIVE_TIME = 0.15  # gather + scatter takes nodes times as long as all_reduce, within this


def tiny(flags: argparse.Namespace) -> list[Row]:
    """Traffic of an epoch of the tiny model."""
    batches = BATCHES[:1] if flags.quick else BATCHES
    rows = [row for n in flags.nodes for batch in batches for row in observe(n, batch, "", flags.steps)]
    return [row | {"holds": abs(row["framed_ratio"] - 1) <= (0.1 if flags.quick else 0.01)} for row in rows]


def large(flags: argparse.Namespace) -> list[Row]:
    """Traffic of an iteration of a model with large tensors, and of one tensor that is gathered and scattered."""
    model, size = ("1M", 4_000_000) if flags.quick else ("25M", 102_000_000)
    rows, allowed = [], 0.1 if flags.quick else 0.005
    for n in flags.nodes:
        rows += [row | {"algorithm": "all_reduce"} for row in observe(n, 4 * n, model, 3)]
        results = on_ranks(time_operations, n, "1gbit", names=["gather + scatter"], size=size)
        for rank in (0, 1):
            expected, observed = gather_scatter_traffic(size, n, rank).sent, results[rank]["gather + scatter"][1]
            about = {"nodes": n, "algorithm": "gather + scatter", "rank": rank, "expected": expected}
            rows.append(about | {"observed": round(observed), "payload_ratio": observed / expected})
    # In a few iterations of a small model the barriers around them have a share of the bytes, too.
    ratio = "framed_ratio" if flags.quick else "payload_ratio"
    return [row | {"holds": abs(row[ratio if ratio in row else "payload_ratio"] - 1) <= allowed} for row in rows]


def observe(nodes: int, batch: int, model: str, steps: int) -> Iterator[Row]:
    """Run task 4's script on emulated nodes, and compare what the interface saw with what it expects.

    model: one of cluster/random_bert.py, or "" for the tiny one. batch: of all workers together.
    """
    check_nodes()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--do_train", "--num_train_epochs", "1", "--max_steps", str(steps), "--output_dir", folder]
        words += ["--overwrite_output_dir", "--per_gpu_train_batch_size", str(batch // nodes)]
        words += ["--model_name_or_path", str(random_bert(model))] if model else []
        run_silently(SCRIPT, on_nodes(nodes, "1gbit", [sys.executable, SCRIPT, *words]))
        runs = [read_run(Path(folder), rank) for rank in (0, 1)]
    for run in runs:
        times = 1 if model else run.steps_per_epoch
        about = {"nodes": nodes, "batch": batch, "rank": run.rank, "iterations": run.counted}
        sent = {"expected": run.expected.sent, "framing": run.framing.sent, "observed": run.observed.sent}
        plain, framed = ratios(run)
        yield {
            **about, **{name: round(times * size) for name, size in sent.items()},
            "payload_ratio": plain, "framed_ratio": framed,
        }  # fmt: skip


def rate(flags: argparse.Namespace) -> list[Row]:
    """An all_reduce at two rates; wire: bytes out of rank 0's interface, over time and rate."""
    mebibytes, names, rows = 1 if flags.quick else 32, ["all_reduce", "gather + scatter"], []
    for n in flags.nodes:
        for name, bits in (("100mbit", 1e8), ("1gbit", 1e9)):
            (seconds, sent), (other, _) = on_ranks(
                time_operations, n, name, names=names, size=mebibytes * 2**20
            )[0].values()  # fmt: skip
            wire, ratio = 8 * sent / seconds / bits, other / seconds
            holds = wire >= WIRE_LIMITS.get(n, 0) and abs(ratio / n - 1) <= COLLECTIVE_TIME
            row = {"nodes": n, "rate": name, "MiB": mebibytes, "all_reduce_s": seconds, "gather_scatter_s": other}
            rows.append(row | {"wire": wire, "ratio": ratio, "holds": flags.quick or holds})
    return rows


def time_messages(config: RunConfig, rounds: int, seconds: float = 0.0) -> dict[str, float]:
    """Return the seconds of each operation, the same on every rank: the shortest, since other programs only add."""
    known = operations(config, 4 * NUMBERS)
    begun_together = {
        name: together(known[name], config.world_size, rounds) for name in ("message", "gather", "scatter")
    }
    in_a_row = time_operations(config, ["hop", "gather + scatter", "all_reduce"], 4 * NUMBERS, seconds)
    return begun_together | {name: took for name, (took, _) in in_a_row.items()}


def together(operation: Callable[[], object], nodes: int, rounds: int) -> float:
    """Return the seconds from a moment at which all ranks begin until the last one is done."""
    taken = []
    for _ in range(1 + rounds):
        begin = torch.tensor(time.perf_counter() + 0.05 * nodes, dtype=torch.float64)  # one clock: it is one machine
        dist.broadcast(begin, 0)
        time.sleep(max(0.0, begin.item() - time.perf_counter()))
        operation()
        taken.append(slowest([time.perf_counter()])[0] - begin.item())
    return min(taken[1:])


def beside_b15(nodes: int, measured: dict[str, float]) -> list[Row]:
    """Return what was measured beside b.15's times."""
    begin_together, receiver_waits = Link(measured["message"], float("inf")), Link(measured["hop"], float("inf"))
    apart, size = measured["gather"] + measured["scatter"], 4 * NUMBERS
    pairs = {
        "gather + scatter": (apart, gather_scatter_seconds(size, nodes, begin_together)),
        "the same in a row": (measured["gather + scatter"], gather_scatter_seconds(size, nodes, receiver_waits)),
        "all_reduce": (measured["all_reduce"], ring_all_reduce_seconds(size, nodes, begin_together)),
    }
    return [
        {"what": name, "nodes": nodes, "measured": seconds, "b.15": model, "ratio": seconds / model}
        for name, (seconds, model) in pairs.items()
    ]


def delay(flags: argparse.Namespace) -> list[Row]:
    """Messages on links with a delay; seconds."""
    rows = []
    for n in flags.nodes:
        effort = {"rounds": 2} if flags.quick else {"rounds": ROUNDS, "seconds": SECONDS}
        times = on_ranks(time_messages, n, delay_ms=DELAY_MS, **effort)[0]
        rows += [row | {"holds": flags.quick or abs(row["ratio"] - 1) <= BOUND} for row in beside_b15(n, times)]
    return rows


def main() -> None:
    parser = check_parser("checks.network", __doc__)
    parser.add_argument(
        "--nodes", type=partial(numbers_of, "--nodes"), default="2,4", help="numbers of emulated nodes (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=0, help="iterations of each run of `tiny` (0: an epoch)")
    run_parts(parser, {"tiny": tiny, "large": large, "rate": rate, "delay": delay}, nodes=[2], steps=3)


if __name__ == "__main__":
    exit_on_input_error(main)
