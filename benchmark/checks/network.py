"""Bytes and times on emulated nodes, beside what the lessons' formulas say.

    python -m benchmark.checks.network [--parts tiny,large,rate,delay] [--nodes 2,4] [--steps 10] [--quick]

tiny     traffic of an epoch, observed over expected: batch 64, 32, 16, all_reduce and gather + scatter (0.99 to 1.01)
large    the same with 102 MB of gradients, 3 iterations (payload alone: 0.995 to 1.005)
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
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import BertForSequenceClassification

from benchmark.checks.delayed_links import network
from benchmark.checks.ranks import eth0, lesson, on_ranks
from benchmark.cost.measuring.transfers import slowest
from benchmark.measure.output import text_table
from benchmark.names import names_of, numbers_of
from beyond.cost_model import Link, gather_scatter_seconds, ring_all_reduce_seconds
from cluster.random_bert import bert_config
from common.arguments import parse_traffic_arguments
from common.config import RunConfig
from common.data.glue import load_glue
from common.errors import exit_on_input_error
from common.models.load import load_tokenizer
from common.optim import set_seed
from common.workers.process_group import Worker
from task4_traffic.compare import ratios, read_run
from task4_traffic.traffic import TrafficRecord

BATCHES = [64, 32, 16]
WIRE_LIMITS = {2: 0.92, 4: 0.87}  # least share of the configured rate, by nodes
NUMBERS, DELAY_MS, ROUNDS, IN_A_ROUND = 1000, 10.0, 15, 3  # of the part `delay`
BOUND = 0.1  # of its times
COLLECTIVE_TIME = 0.15  # gather + scatter takes nodes times as long as all_reduce, within this
Row = dict[str, Any]


def gather_and_scatter(tensor: torch.Tensor, pieces: list[torch.Tensor] | None = None) -> None:
    """As task 2a moves one gradient; the mean itself costs no byte. pieces: where rank 0 receives."""
    rank, n = dist.get_rank(), dist.get_world_size()
    gathered = pieces or ([torch.empty_like(tensor) for _ in range(n)] if rank == 0 else None)
    dist.gather(tensor, gathered, dst=0)
    dist.scatter(tensor, gathered, src=0)


def observe_traffic(config: RunConfig, size: str, batches: list[int], steps: int) -> list[Row]:
    """Train task 4's script, with both algorithms, and compare what the interface saw.

    `size` is one of cluster/random_bert.py, or "" for the tiny model; a batch is that of all workers together.
    """
    task, rows, worker = lesson("task4_traffic"), [], Worker(config.rank, config.world_size)
    own_sync, sync_2a = task.sync_gradients, lesson("task2a_gather_scatter").sync_gradients

    def gather_scatter_sync(model: Any, world_size: int, dtype: object, sent: list) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                elements, size = parameter.grad.numel(), parameter.grad.element_size()
                entry = {"dtype": str(dtype), "elements": elements, "bytes": elements * size}
                sent.append({"shape": list(parameter.grad.shape), **entry})
        sync_2a(model, world_size)

    place = {name: str(getattr(config, name)) for name in ("master_ip", "master_port", "world_size")}
    flags = [word for name, value in place.items() for word in (f"--{name}", value)]
    flags += ["--local_rank", str(config.rank), "--do_train", "--num_train_epochs", "1", "--max_steps", str(steps)]
    for algorithm, sync, send in (
        ("all_reduce", own_sync, None), ("gather + scatter", gather_scatter_sync, gather_and_scatter)
    ):  # fmt: skip
        task.sync_gradients = sync
        for batch in batches:
            own = ["--per_gpu_train_batch_size", str(batch // worker.world_size)]
            own += ["--output_dir", str(config.output_dir / f"{algorithm}_{batch}".replace(" ", ""))]
            run = parse_traffic_arguments("task4_traffic", [*flags, *own])
            data = load_glue(run, load_tokenizer("tiny", "bert"))
            set_seed(run.seed)
            model = BertForSequenceClassification(bert_config(size)) if size else task.load_model(run)
            record = TrafficRecord(run, worker, send)
            record.describe(model, len(data.train), len(data.dev))
            task.train(run, worker, model, data, record)
            record.write()
            seen = read_run(run.output_dir, worker.rank, algorithm)
            times = 1 if size else seen.steps_per_epoch
            plain, framed = ratios(seen)
            rows.append({
                "nodes": worker.world_size, "batch": batch, "algorithm": algorithm, "rank": worker.rank,
                "iterations": seen.counted, "expected": times * seen.expected.sent,
                "framing": times * seen.framing.sent, "observed": times * seen.observed.sent,
                "payload_ratio": plain, "framed_ratio": framed,
            })  # fmt: skip
    return rows


def traffic(part: str, nodes: list[int], steps: int, quick: bool) -> list[Row]:
    """One row for every number of nodes, algorithm, batch size and kind of rank; prints them."""
    rows: list[Row] = []
    for n in nodes:
        size, batches = ("", BATCHES) if part == "tiny" else ("1M" if quick else "25M", [4 * n])
        results = on_ranks(observe_traffic, n, "1gbit", size=size, batches=batches[:1] if quick else batches,
                           steps=steps if part == "tiny" else 3)  # fmt: skip
        rows += [row for result in results[:2] for row in result]
    for row in rows:
        # With framing for small tensors, where it matters. In a few iterations of a small model the barriers around
        # them have a share of the bytes, too.
        ratio = row["framed_ratio" if quick or part == "tiny" else "payload_ratio"]
        row["holds"] = abs(ratio - 1) <= (0.1 if quick else 0.01 if part == "tiny" else 0.005)
    print(f"\n{part}: bytes sent, observed over expected; bytes are those of an epoch (large: of an iteration)")
    show(rows, {"expected": ",.0f", "framing": ",.0f", "observed": ",.0f"} | dict.fromkeys(list(rows[0])[-3:-1], ".4f"))
    return rows


def show(rows: list[Row], forms: dict[str, str]) -> None:
    heads = [name for name in rows[0] if name != "holds"]
    cells = [[format(row[name], forms.get(name, "")) for name in heads] for row in rows]
    ends = ["" if row["holds"] else "<-- outside" for row in rows]
    print(text_table([[*heads, ""], *([*line, end] for line, end in zip(cells, ends, strict=True))]), flush=True)


def time_collectives(config: RunConfig, mebibytes: int, tries: int) -> Row:
    """Seconds and bytes of an all_reduce, and of gather and scatter; the best of `tries`."""
    tensor = torch.ones(mebibytes * 2**18)
    # Made before: the first touch of so much memory takes time that is not the network's.
    room = [torch.ones_like(tensor) for _ in range(config.world_size)] if config.rank == 0 else None

    def timed(send: Callable[[], object]) -> tuple[float, int]:
        dist.barrier()
        before, begin = eth0(), time.perf_counter()
        send()
        dist.barrier()  # it ends when the slowest rank has ended it
        return time.perf_counter() - begin, eth0() - before

    seconds, sent = min(timed(lambda: dist.all_reduce(tensor)) for _ in range(tries))
    other, _ = min(timed(lambda: gather_and_scatter(tensor, room)) for _ in range(tries))
    return {"all_reduce_s": seconds, "gather_scatter_s": other, "sent": sent}


def rate(nodes: list[int], quick: bool) -> list[Row]:
    """An all_reduce at two rates."""
    mebibytes, tries = (1, 1) if quick else (32, 5)
    rows = []
    for n in nodes:
        for name, bits in (("100mbit", 1e8), ("1gbit", 1e9)):
            row = {"nodes": n, "rate": name, **on_ranks(time_collectives, n, name, mebibytes=mebibytes, tries=tries)[0]}
            row["wire"] = 8 * row.pop("sent") / row["all_reduce_s"] / bits
            row["ratio"] = row["gather_scatter_s"] / row["all_reduce_s"]
            fast, in_time = row["wire"] >= WIRE_LIMITS.get(n, 0), abs(row["ratio"] / n - 1) <= COLLECTIVE_TIME
            rows.append(row | {"holds": quick or (fast and in_time)})
    print(f"\nrate: {mebibytes} MiB, best of {tries}; wire: bytes out of rank 0's interface, over time and rate")
    show(rows, dict.fromkeys(("all_reduce_s", "gather_scatter_s", "wire"), ".3f") | {"ratio": ".2f"})
    return rows


def time_messages(config: RunConfig, rounds: int) -> dict[str, float]:
    """Return the seconds of each operation, the same on every rank: the shortest, since other programs only add."""
    rank, nodes = config.rank, config.world_size
    tensor, other = torch.zeros(NUMBERS), torch.zeros(NUMBERS)
    everyone = [torch.zeros(NUMBERS) for _ in range(nodes)] if rank == 0 else None

    def message() -> None:
        if rank < 2:
            dist.send(tensor, 1) if rank == 0 else dist.recv(other, 0)

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank < 2:
                dist.send(tensor, 1 - rank) if rank == sender else dist.recv(other, 1 - rank)

    def gather() -> None:
        dist.gather(tensor, everyone, dst=0)

    def scatter() -> None:
        dist.scatter(tensor, everyone, src=0)

    def gather_scatter() -> None:
        gather()
        scatter()

    return {
        "message": together(message, nodes, rounds),
        "answer": in_a_row(there_and_back, rounds) / 2,
        "gather": together(gather, nodes, rounds),
        "scatter": together(scatter, nodes, rounds),
        "gather_scatter": in_a_row(gather_scatter, rounds),
        "all_reduce": in_a_row(lambda: dist.all_reduce(tensor), rounds),
    }


def together(operation: Callable[[], None], nodes: int, rounds: int) -> float:
    """Return the seconds from a moment at which all ranks begin until the last one is done."""
    taken = []
    for _ in range(1 + rounds):
        begin = torch.tensor(time.perf_counter() + 0.05 * nodes, dtype=torch.float64)  # one clock: it is one machine
        dist.broadcast(begin, 0)
        time.sleep(max(0.0, begin.item() - time.perf_counter()))
        operation()
        taken.append(slowest([time.perf_counter()])[0] - begin.item())
    return min(taken[1:])


def in_a_row(operation: Callable[[], None], rounds: int) -> float:
    """Return the mean seconds of an operation that follows itself IN_A_ROUND times, on the slowest rank."""
    found = []
    for _ in range(rounds):
        operation()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(IN_A_ROUND):
            operation()
        found += slowest([(time.perf_counter() - begin) / IN_A_ROUND])
    return min(found)


def beside_b15(nodes: int, measured: dict[str, float]) -> list[Row]:
    """Return what was measured beside b.15's times."""
    begin_together, receiver_waits = Link(measured["message"], float("inf")), Link(measured["answer"], float("inf"))
    apart, size = measured["gather"] + measured["scatter"], 4 * NUMBERS
    pairs = {
        "gather + scatter": (apart, gather_scatter_seconds(size, nodes, begin_together)),
        "the same in a row": (measured["gather_scatter"], gather_scatter_seconds(size, nodes, receiver_waits)),
        "all_reduce": (measured["all_reduce"], ring_all_reduce_seconds(size, nodes, begin_together)),
    }
    return [
        {"what": name, "nodes": nodes, "measured": seconds, "b.15": model, "ratio": seconds / model}
        for name, (seconds, model) in pairs.items()
    ]


def delay(nodes: list[int], quick: bool) -> list[Row]:
    """Messages on links with a delay."""
    kind, reason = network()
    if not kind:
        print(f"\ndelay: skipped: {reason}")
        return []
    rows = []
    for n in nodes:
        times = on_ranks(time_messages, n, delay_ms=DELAY_MS, rounds=2 if quick else ROUNDS)[0]
        rows += [row | {"holds": quick or abs(row["ratio"] - 1) <= BOUND} for row in beside_b15(n, times)]
    print(f"\ndelay: links with a delay of {DELAY_MS:g} ms ({kind}); {NUMBERS:,} numbers; seconds")
    show(rows, {"measured": ".4f", "b.15": ".4f", "ratio": ".2f"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="all", help="parts to run, separated by commas (all)")
    parser.add_argument("--nodes", default="2,4", help="numbers of emulated nodes (%(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="iterations of each run of `tiny` (0: an epoch)")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, takes seconds; judges no times")
    arguments = parser.parse_args()
    quick, nodes, steps = arguments.quick, numbers_of("--nodes", arguments.nodes), arguments.steps
    if quick:
        nodes, steps = [2], 3
    parts: dict[str, Callable[[], list[Row]]] = {
        "tiny": lambda: traffic("tiny", nodes, steps, quick),
        "large": lambda: traffic("large", nodes, steps, quick),
        "rate": lambda: rate(nodes, quick),
        "delay": lambda: delay(nodes, quick),
    }
    found = {part: parts[part]() for part in names_of("--parts", arguments.parts, parts)}
    holds = all(row["holds"] for rows in found.values() for row in rows)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; all bounds hold: {holds}")
    print(json.dumps({**found, "holds": holds}))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
