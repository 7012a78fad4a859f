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
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmark.checks.delayed_links import command_on_nodes, environment, network
from beyond.cost_model import Link, gather_scatter_seconds, ring_all_reduce_seconds
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT

NUMBERS = 1000
IN_A_ROUND = 3
BOUND = 0.1
RESULT = "times: "  # begins rank 0's line


def measure(rank: int, nodes: int, rounds: int) -> dict[str, float]:
    """Return the seconds of each operation, the same on every rank: the shortest, since other programs only add."""
    tensor, other, number = torch.zeros(NUMBERS), torch.zeros(NUMBERS), torch.zeros(1)
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
        "all_reduce_of_one": in_a_row(lambda: dist.all_reduce(number), rounds),
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


def rank_main(rank: int, nodes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method="tcp://10.10.1.1:6585", rank=rank, world_size=nodes)
    found = measure(rank, nodes, rounds)
    if rank == 0:
        print(RESULT + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def compare(nodes: int, measured: dict[str, float]) -> list[dict[str, float | str | int]]:
    """Return what was measured beside b.15's times, in rows."""
    begin_together, receiver_waits = Link(measured["message"], float("inf")), Link(measured["answer"], float("inf"))
    apart = measured["gather"] + measured["scatter"]
    pairs = {
        "gather + scatter": (apart, gather_scatter_seconds(4 * NUMBERS, nodes, begin_together)),
        "the same in a row": (
            measured["gather_scatter"],
            gather_scatter_seconds(4 * NUMBERS, nodes, receiver_waits),
        ),
        "all_reduce": (measured["all_reduce"], ring_all_reduce_seconds(4 * NUMBERS, nodes, begin_together)),
    }
    return [{"nodes": nodes, "what": name, "measured": time, "b.15": model} for name, (time, model) in pairs.items()]


def run(kind: str, nodes: int, delay_ms: float, rounds: int) -> dict[str, float]:
    """Start the ranks on nodes with delayed links; raises InputError with their last lines if one fails."""
    own = ["python", "-m", "benchmark.checks.message_times", "--rank", "{rank}"]
    command = command_on_nodes(kind, nodes, delay_ms, [*own, "--nodes", str(nodes), "--rounds", str(rounds)])
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = [line.partition(RESULT)[2] for line in done.stdout.splitlines() if RESULT in line]
    if done.returncode or not lines:
        raise InputError(f"{nodes} nodes failed: {done.stdout[-1500:]}")
    return json.loads(lines[0])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,3,4", help="numbers of nodes (%(default)s)")
    parser.add_argument("--delay_ms", type=float, default=10.0, help="of every link, one way (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=15, help="of each operation, of which the shortest counts (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="two nodes, two rounds; times are not judged")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # in the processes that are started
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return rank_main(arguments.rank, int(arguments.nodes), arguments.rounds)
    kind, reason = network()
    if not kind:
        print(f"skipped: {reason}")
        print(json.dumps({"skipped": reason}))
        return None
    nodes, rounds = ([2], 2) if arguments.quick else ([int(n) for n in arguments.nodes.split(",")], arguments.rounds)
    rows, figures = [], {}
    print(f"links with a delay of {arguments.delay_ms:g} ms ({kind}); {NUMBERS:,} numbers; times in ms")
    print(f"{'nodes':>5}  {'':<18} {'measured':>9} {'b.15':>9} {'ratio':>6}")
    for n in nodes:
        figures[n] = run(kind, n, arguments.delay_ms, rounds)
        for row in compare(n, figures[n]):
            row["ratio"] = row["measured"] / row["b.15"]  # type: ignore[operator]
            rows.append(row)
            shown = [float(row[key]) * 1e3 for key in ("measured", "b.15")]
            print(f"{n:>5}  {row['what']:<18} {shown[0]:>9.1f} {shown[1]:>9.1f} {row['ratio']:>6.2f}", flush=True)
        print(f"{n:>5}  all_reduce of 1   {figures[n]['all_reduce_of_one'] * 1e3:>9.1f}")
    holds = arguments.quick or all(abs(float(row["ratio"]) - 1) <= BOUND for row in rows)
    print(f"torch {torch.__version__}; all within {BOUND:.0%}: {'not judged' if arguments.quick else holds}")
    print(json.dumps({"network": kind, "delay_ms": arguments.delay_ms, "rows": rows, "times": figures, "holds": holds}))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
