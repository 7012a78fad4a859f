"""Compare the bytes that emulated nodes send, counted at their interfaces, with the expected ones.

    python -m benchmark.checks.network [--parts tiny,large,bert,rate,ladder] [--nodes 2,4] [--steps 10] [--quick]

tiny     traffic of an epoch, observed over expected: batch 64, 32, 16, all_reduce and gather + scatter (0.99 to 1.01)
large    the same with 102 MB of gradients, 3 iterations (payload alone: 0.995 to 1.005)
bert     the same with a BERT of 108 million parameters, 4 nodes, all_reduce
rate     a 32 MiB all_reduce at 100 Mbit/s and 1 Gbit/s, and gather + scatter beside it
ladder   2a, 2b and 3 on 4 nodes at 1 Gbit/s with 22 million parameters, and what other interfaces saw

--steps makes `tiny` short; --quick runs every part on 2 nodes with small models, and judges no times. The last line of
stdout is one JSON object; exit code 0 only if all bounds hold.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT

MODELS = {"tiny": "", "large": "25M", "bert": "108M"}  # of cluster/random_bert.py; "": the tiny model
PARTS = ("tiny", "large", "bert", "rate", "ladder")
BATCHES = (64, 32, 16)
WIRE_LIMITS = {2: 0.92, 4: 0.87}  # least share of the configured rate, by nodes
OUTSIDE = {True: "", False: "   <-- outside"}
COLLECTIVE_TIME = 0.15  # gather + scatter takes nodes times as long as all_reduce, within this


def on_nodes(nodes: int, rate: str, words: list[str], more: tuple[str, ...] = ()) -> None:
    """Run benchmark.checks.network_rank on emulated nodes; raises InputError with its last lines if it fails."""
    place = ["--master_ip", "10.10.1.1", "--master_port", "6585", "--world_size", str(nodes), "--local_rank", "{rank}"]
    command = [sys.executable, "-m", "cluster.emulate", "--nodes", str(nodes), "--rate", rate, *more, "--"]
    command += ["python", "benchmark/checks/network_rank.py", *words, *place]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise InputError(f"{' '.join(words[:2])} on {nodes} nodes failed: {done.stdout[-1500:]}")


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result_*.json"))]


def traffic(part: str, nodes: list[int], steps: int, quick: bool) -> list[dict[str, Any]]:
    """One row for every number of nodes, algorithm, batch size and kind of rank; prints them."""
    print(f"\n{part}: bytes sent, observed over expected; bytes are those of an epoch (large, bert: of an iteration)")
    head = (
        f"{'nodes':>5} {'algorithm':<17} {'batch':>5} {'rank':>4} {'iterations':>10} {'expected':>14} {'framing':>11}"
    )
    print(f"{head} {'observed':>14} {'/ payload':>9} {'/ with framing':>14}")
    rows = []
    for n in nodes:
        with tempfile.TemporaryDirectory() as folder:
            model, batches = MODELS[part], BATCHES if part == "tiny" else (4 * n,)
            if quick:
                model, batches = model and "1M", batches[:1]
            on_nodes(n, "1gbit", ["traffic", part, str(steps), folder, model, ",".join(map(str, batches))])
            for row in (row for result in results(Path(folder)) for row in result["rows"] if row["rank"] < 2):
                rows.append(row)
                row["holds"] = within(row, part, quick)
                print(
                    f"{n:>5} {row['algorithm']:<17} {row['batch']:>5} {row['rank']:>4} {row['iterations']:>10}"
                    f" {row['expected']:>14,.0f} {row['framing']:>11,.0f} {row['observed']:>14,.0f}"
                    f" {row['payload_ratio']:>9.4f} {row['framed_ratio']:>14.4f}{OUTSIDE[row['holds']]}",
                    flush=True,
                )
    return rows


def within(row: dict[str, Any], part: str, quick: bool) -> bool:
    """The bounds: with framing for small tensors, where it matters; the payload alone for large ones.

    In a few iterations of a small model the barriers around them have a share of the bytes, too.
    """
    if quick:
        return abs(row["framed_ratio"] - 1) <= 0.1
    if part == "tiny":
        return abs(row["framed_ratio"] - 1) <= 0.01
    return abs(row["payload_ratio"] - 1) <= 0.005


def rate(nodes: list[int], quick: bool) -> list[dict[str, Any]]:
    """An all_reduce at two rates."""
    mebibytes, tries = (1, 1) if quick else (32, 5)
    print(f"\nrate: {mebibytes} MiB, best of {tries}; wire: bytes out of rank 0's interface, over time and rate")
    print(f"{'nodes':>5} {'rate':>8} {'all_reduce':>11} {'wire':>6} {'gather + scatter':>17} {'ratio':>6}")
    rows = []
    for n in nodes:
        for name in ("100mbit", "1gbit"):
            with tempfile.TemporaryDirectory() as folder:
                on_nodes(n, name, ["rate", str(mebibytes), str(tries), folder])
                row = {"nodes": n, "rate": name, **results(Path(folder))[0]}
            bits = 1e8 if name == "100mbit" else 1e9
            row["wire"] = 8 * row["all_reduce_bytes"] / row["all_reduce_seconds"] / bits
            row["ratio"] = row["gather_scatter_seconds"] / row["all_reduce_seconds"]
            fast, in_time = row["wire"] >= WIRE_LIMITS.get(n, 0), abs(row["ratio"] / n - 1) <= COLLECTIVE_TIME
            row["holds"] = quick or (fast and in_time)
            print(
                f"{n:>5} {name:>8} {row['all_reduce_seconds']:>9.3f} s {row['wire']:>6.3f}"
                f" {row['gather_scatter_seconds']:>15.3f} s {row['ratio']:>6.2f}{OUTSIDE[row['holds']]}",
                flush=True,
            )
            rows.append(row)
    return rows


def ladder(iterations: int, quick: bool) -> dict[str, Any]:
    """Tasks 2a, 2b and 3 in the same processes' place, on nodes that have a control network as well."""
    nodes, size = (2, "1M") if quick else (4, "22M")
    print(f"\nladder: {nodes} nodes at 1 Gbit/s, a BERT of {size} parameters with random weights")
    rows, names = [], {"2a": "gather + scatter", "2b": "all_reduce", "3": "DDP"}
    for task, name in names.items():
        with tempfile.TemporaryDirectory() as folder:
            on_nodes(nodes, "1gbit", ["ladder", task, str(iterations), folder, size], ("--control",))
            every = results(Path(folder))
        losses = [sum(step) / nodes for step in zip(*(result["losses"] for result in every), strict=True)]
        elsewhere = sum(result["control"] for result in every)
        seconds, sent = every[0]["seconds"], [result["experiment"] for result in every]
        rows.append({"task": task, "losses": losses, "seconds": seconds, "sent": sent, "elsewhere": elsewhere})
        told = " ".join(f"{loss:.5f}" for loss in losses[:5])
        print(f"{task:<3} {name:<17} {seconds:7.3f} s/iteration   losses {told}", end="   ")
        print(f"MB on eth0 of ranks 0 and 1: {sent[0] / 1e6:.0f} {sent[1] / 1e6:.0f}   bytes elsewhere: {elsewhere}")
    ratios = {row["task"]: row["seconds"] / rows[-1]["seconds"] for row in rows}
    apart = max(abs(a - b) for row in rows for a, b in zip(row["losses"], rows[0]["losses"], strict=True))
    print(f"2a : 2b : 3 = {' : '.join(f'{ratio:.2f}' for ratio in ratios.values())}; losses differ by {apart:.1e}")
    holds = apart <= 1e-5 and not any(row["elsewhere"] for row in rows)
    holds &= quick or ratios["2a"] > ratios["2b"] > 1
    return {"rows": rows, "ratios": ratios, "losses_apart": apart, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas (%(default)s)")
    parser.add_argument("--nodes", default="2,4", help="numbers of emulated nodes (%(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="iterations of each run of `tiny` (0: an epoch)")
    parser.add_argument("--ladder_steps", type=int, default=8, help="iterations of each run of `ladder` (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, takes seconds; time limits are not checked"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.nodes, arguments.steps, arguments.ladder_steps = "2", 3, 2
    parts, nodes = arguments.parts.split(","), [int(n) for n in arguments.nodes.split(",")]
    if unknown := set(parts) - set(PARTS):
        raise InputError(f"--parts: expected some of {', '.join(PARTS)}; got {min(unknown)!r}")
    found: dict[str, Any] = {}
    for part in ("tiny", "large", "bert"):
        if part in parts:
            on = [4] if part == "bert" and not arguments.quick else nodes
            found[part] = traffic(part, on, arguments.steps if part == "tiny" else 3, arguments.quick)
    if "rate" in parts:
        found["rate"] = rate(nodes, arguments.quick)
    if "ladder" in parts:
        found["ladder"] = [ladder(arguments.ladder_steps, arguments.quick)]
    holds = all(row["holds"] for rows in found.values() for row in rows)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; all bounds hold: {holds}")
    print(json.dumps({**found, "holds": holds}))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
