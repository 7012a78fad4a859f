"""What this machine's GPUs do: every framework in fp32, fp16 and bf16, with utilisation, power and temperature.

    python -m benchmark.checks.gpu [--model gpt2] [--batch_size 8] [--steps 30] [--quick]

Runs DataParallel, DistributedDataParallel, FSDP2 and DeepSpeed's ZeRO with and without offload by benchmark.run, each
in processes of its own; with two or more GPUs a worker has one of them, and they talk by NCCL. Utilisation, power and
temperature are those of the first worker's GPU at the end of the timed steps. What a framework cannot do is recorded
with its reason.

Without a GPU it says so in one line, and does nothing. --output_dir has what each run has left. The last line is one
JSON object; exit code 0 if no run failed that should have worked.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmark.arguments import PRECISIONS
from benchmark.arguments import parse as parse_run
from benchmark.checks.check import Row, SkippedError, check_parser, run_parts
from benchmark.names import check_model
from benchmark.sweep import execute
from benchmark.tables import SweepRun, row_of
from common.errors import InputError, exit_on_input_error
from common.flags import positive
from common.paths import ROOT

STRATEGIES = (
    *("single", "dp", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"),
    *("zero1_offload", "zero2_offload", "zero3_offload"),
)
NO_GPU = "no GPU that PyTorch can see: nothing was run; use a machine with one, and a build of PyTorch for it"


def runs(gpus: int, model: str, batch_size: int, quick: bool = False) -> list[tuple[SweepRun, str]]:
    """Return what is run on so many GPUs: each strategy on one and on all of them, in every precision."""
    return [
        (SweepRun(strategy, model, batch_size, workers), precision)
        for strategy in (("single", "ddp") if quick else STRATEGIES)
        for precision in PRECISIONS
        for workers in sorted({1} if strategy in ("single", "dp") else {1, gpus})  # dp is one process for all GPUs
    ]


def run_one(run: SweepRun, precision: str, arguments: argparse.Namespace) -> Row:
    """Run it, if that is possible here; its row."""
    more = ["--precision", precision, "--length", str(arguments.length)]
    try:
        parse_run(["--strategy", run.strategy, "--model", run.model, "--workers", str(run.workers), *more])
    except InputError as error:
        return described(run, precision, {"outcome": "not possible", "message": str(error)})
    (arguments.output_dir / precision / run.name).mkdir(parents=True, exist_ok=True)
    return described(run, precision, execute(run, arguments.output_dir / precision, arguments.steps, more))


def described(run: SweepRun, precision: str, result: dict[str, Any]) -> Row:
    """Return a run's row: that of benchmark.frameworks, its precision, and how it ended."""
    failed = {"outcome": result["outcome"], "message": result["message"]} if "outcome" in result else {}
    row = row_of(run, {run: {} if failed else result})
    return {"precision": precision} | row | {"outcome": "ok", "message": None} | failed


def gpus(flags: argparse.Namespace) -> list[Row]:
    """The row of every run."""
    check_model("--model", flags.model)
    if not torch.cuda.is_available():
        raise SkippedError(NO_GPU)
    rows = []
    for run, precision in runs(torch.cuda.device_count(), flags.model, flags.batch_size, flags.quick):
        row = run_one(run, precision, flags)
        rows.append(row | {"holds": row["outcome"] not in ("OOM", "error")})
        print(*row.values(), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = check_parser("checks.gpu", __doc__)
    add = parser.add_argument
    add("--model", default="gpt2", help="gpt2")
    add("--batch_size", type=positive, default=8, help="examples of one worker (8)")
    add("--length", type=positive, default=256, help="tokens of an example (256)")
    add("--steps", type=positive, default=30, help="of each run, of which 2 are dropped and 2 are traced (30)")
    add("--output_dir", type=Path, default=ROOT / "runs" / "benchmark" / "gpu")
    run_parts(parser, {"gpus": gpus}, model="gpt2-tiny", batch_size=2, length=64, steps=8)


if __name__ == "__main__":
    exit_on_input_error(main)
