"""Compare the times of gather, scatter and all_reduce on links with a delay with those that b.15 computes.

    python -m benchmark.checks.message_times [--nodes 2,3,4] [--delay_ms 10] [--rounds 15] [--quick]

The latency that b.15 needs is measured with two ranks and as many numbers:

message   all ranks begin at the same time. Gloo's receiver first says that it is ready, so this takes a round trip
answer    half of there and back: the receiver has been waiting already, so this takes one way

From it, b.15 computes what 2, 3 and 4 nodes need for 1,000 numbers. gather and scatter, timed apart, and the rounds of
all_reduce begin at the same time on all ranks. In task 2a one follows the other: there the receivers wait already. 4 kB
are little beside the delay, so the bandwidth is left out. --quick takes few rounds and judges nothing.

The last line of stdout is one JSON object; exit code 0 if all times are within 10 %, or if this machine has no
such links: then "skipped" holds the reason.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmark.checks.delayed_links import network
from benchmark.checks.ranks import on_ranks
from benchmark.measure.output import text_table
from benchmark.names import numbers_of
from beyond.cost_model import Link, gather_scatter_seconds, ring_all_reduce_seconds
from common.config import RunConfig
from common.errors import exit_on_input_error

NUMBERS = 1000
IN_A_ROUND = 3
BOUND = 0.1


def measure(config: RunConfig, rounds: int) -> dict[str, float]:
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
        end = torch.tensor(time.perf_counter(), dtype=torch.float64)
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        taken.append((end - begin).item())
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
        taken = torch.tensor((time.perf_counter() - begin) / IN_A_ROUND, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        found.append(taken.item())
    return min(found)


def compare(nodes: int, measured: dict[str, float]) -> list[dict[str, float | str | int]]:
    """Return what was measured beside b.15's times, in rows."""
    begin_together, receiver_waits = Link(measured["message"], float("inf")), Link(measured["answer"], float("inf"))
    apart, size = measured["gather"] + measured["scatter"], 4 * NUMBERS
    pairs = {
        "gather + scatter": (apart, gather_scatter_seconds(size, nodes, begin_together)),
        "the same in a row": (measured["gather_scatter"], gather_scatter_seconds(size, nodes, receiver_waits)),
        "all_reduce": (measured["all_reduce"], ring_all_reduce_seconds(size, nodes, begin_together)),
    }
    return [
        {"nodes": nodes, "what": name, "measured": seconds, "b.15": model, "ratio": seconds / model}
        for name, (seconds, model) in pairs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nodes", default="2,3,4", help="numbers of nodes (%(default)s)")
    add("--delay_ms", type=float, default=10.0, help="of every link, one way (%(default)s)")
    add("--rounds", type=int, default=15, help="of each operation, of which the shortest counts (%(default)s)")
    add("--quick", action="store_true", help="two nodes, two rounds; times are not judged")
    arguments = parser.parse_args()
    kind, reason = network()
    if not kind:
        print(f"skipped: {reason}")
        print(json.dumps({"skipped": reason}))
        return
    nodes, rounds = ([2], 2) if arguments.quick else (numbers_of("--nodes", arguments.nodes), arguments.rounds)
    times = {n: on_ranks(measure, n, delay_ms=arguments.delay_ms, rounds=rounds)[0] for n in nodes}
    rows = [row for n in nodes for row in compare(n, times[n])]
    print(f"links with a delay of {arguments.delay_ms:g} ms ({kind}); {NUMBERS:,} numbers; times in ms")
    cells = [
        [str(row["what"]), str(row["nodes"]), *(f"{1e3 * float(row[name]):.1f}" for name in ("measured", "b.15")),
         f"{row['ratio']:.2f}"]
        for row in rows
    ]  # fmt: skip
    print(text_table([["", "nodes", "measured", "b.15", "ratio"], *cells]))
    holds = arguments.quick or all(abs(float(row["ratio"]) - 1) <= BOUND for row in rows)
    print(f"torch {torch.__version__}; all within {BOUND:.0%}: {'not judged' if arguments.quick else holds}")
    result = {"network": kind, "delay_ms": arguments.delay_ms, "rows": rows, "times": times, "holds": holds}
    print(json.dumps(result))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
