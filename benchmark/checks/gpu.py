"""What this machine's GPUs do: every framework in fp32, fp16 and bf16, with utilisation, power and temperature.

    python -m benchmark.checks.gpu [--model gpt2] [--batch_size 8] [--steps 30] [--quick]

Runs DataParallel, DistributedDataParallel, FSDP2 and DeepSpeed's ZeRO with and without offload by benchmark.run, each
in processes of its own; with two or more GPUs a worker has one of them, and they talk by NCCL. Utilisation, power and
temperature are those of the first worker's GPU at the end of the timed steps. What a framework cannot do is recorded
with its reason.

Without a GPU it says so in one line, and does nothing. The last line is one JSON object; --output_dir keeps it, too.
Exit code 0 if no run failed that should have worked.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmark.arguments import PRECISIONS
from benchmark.arguments import parse as parse_run
from benchmark.measure.machine import environment
from benchmark.names import check_model
from benchmark.sweep import execute
from benchmark.tables import SweepRun
from common.errors import InputError, exit_on_input_error
from common.flags import Parser, check_at_least
from common.paths import ROOT, atomic_write

STRATEGIES = (
    *("single", "dp", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"),
    *("zero1_offload", "zero2_offload", "zero3_offload"),
)
NO_GPU = "no GPU that PyTorch can see: nothing was run; use a machine with one, and a build of PyTorch for it"


FIGURES = {  # heading -> where it is in a result of benchmark.run
    "ms per step": ("step_ms",),
    "tokens/s": ("tokens_per_second",),
    "exposed ms": ("communication", "exposed_ms"),
    "peak bytes": ("memory", "peak"),  # of the first worker's GPU
    "GPU %": ("utilisation", "gpu_utilisation"),
    "W": ("utilisation", "gpu_power"),
    "degrees C": ("utilisation", "gpu_temperature"),
    "last loss": ("last_loss",),
}
Row = dict[str, Any]


def runs(gpus: int, model: str, batch_size: int, strategies: Sequence[str] = STRATEGIES) -> list[tuple[SweepRun, str]]:
    """Return what is run on so many GPUs: each strategy on one and on all of them, in every precision."""
    found = []
    for strategy, precision in product(strategies, PRECISIONS):
        alone = strategy in ("single", "dp")  # dp is one process for all GPUs
        for workers in sorted({1} if alone else {1, gpus}):
            found.append((SweepRun(strategy, model, batch_size, workers), precision))
    return found


def reason_against(run: SweepRun, precision: str) -> str:
    """Return why this run is not possible here, in one line; nothing if it is."""
    words = ["--strategy", run.strategy, "--model", run.model, "--workers", str(run.workers), "--precision", precision]
    try:
        parse_run(words)
    except InputError as error:
        return str(error)
    return ""


def row_of(run: SweepRun, precision: str, result: dict[str, Any]) -> Row:
    """Return the figures of a result of benchmark.run, or of a failure; None: not measured."""
    row: Row = {
        "strategy": run.strategy,
        "precision": precision,
        "workers": run.workers,
        "outcome": "ok",
        "message": "",
    }
    if "outcome" in result:
        return row | {"outcome": "failed", "message": f"{result['outcome']}: {result['message']}"}
    for name, path in FIGURES.items():
        value: Any = result
        for key in path:
            value = value.get(key) if value else None
        row[name] = value
    return row


def table(rows: list[Row]) -> str:
    lines = [f"{'strategy':<15}{'precision':<10}{'workers':>7}" + "".join(f"{name:>14}" for name in FIGURES)]
    for row in rows:
        start = f"{row['strategy']:<15}{row['precision']:<10}{row['workers']:>7}"
        if row["outcome"] != "ok":
            lines.append(f"{start}  {row['outcome']}: {row['message']}")
            continue
        lines.append(start + "".join(f"{'-' if row[name] is None else f'{row[name]:.1f}':>14}" for name in FIGURES))
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, gpus: int) -> list[Row]:
    """Run everything; prints each row as soon as it is there."""
    rows = []
    strategies = ("single", "ddp") if arguments.quick else STRATEGIES
    for run, precision in runs(gpus, arguments.model, arguments.batch_size, strategies):
        if reason := reason_against(run, precision):
            row = row_of(run, precision, {"outcome": "", "message": ""}) | {
                "outcome": "not possible",
                "message": reason,
            }
        else:
            folder = arguments.output_dir / precision
            (folder / run.name).mkdir(parents=True, exist_ok=True)
            more = ["--precision", precision, "--length", str(arguments.length)]
            row = row_of(run, precision, execute(run, folder, arguments.steps, more))
        rows.append(row)
        print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = Parser(prog="python -m benchmark.checks.gpu", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", default="gpt2", help="gpt2")
    add("--batch_size", type=int, default=8, help="examples of one worker (8)")
    add("--length", type=int, default=256, help="tokens of an example (256)")
    add("--steps", type=int, default=30, help="of each run, of which 2 are dropped and 2 are traced (30)")
    add("--output_dir", type=Path, default=ROOT / "runs" / "benchmark" / "gpu")
    add("--quick", action="store_true", help="a tiny model, few steps, and only one worker alone and ddp")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.batch_size, arguments.length, arguments.steps = "gpt2-tiny", 2, 64, 8
    check_at_least(arguments, 1, "batch_size", "steps")
    check_model("--model", arguments.model)
    if not torch.cuda.is_available():
        print(NO_GPU)
        print(json.dumps({"gpus": [], "rows": []}))
        return
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows = measure(arguments, len(gpus))
    print(f"{len(gpus)} x {gpus[0]}, {arguments.model}, {arguments.batch_size} x {arguments.length} tokens each")
    print(table(rows))
    result = {"gpus": gpus, "rows": rows, "environment": environment()}
    with atomic_write(arguments.output_dir / "gpu.json") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))
    sys.exit(1 if any(row["outcome"] == "failed" for row in rows) else 0)


if __name__ == "__main__":
    exit_on_input_error(main)
