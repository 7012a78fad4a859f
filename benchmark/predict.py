"""Predict a step before it is run: its time with parts, the bytes that a worker sends, the memory that it needs.

    python -m benchmark.predict --strategies ddp --workers 4 --rate 1gbit
    python -m benchmark.predict --strategies own_zero3 --model gpt2 --workers 8 --rate 10gbit --latency 50us --cores 2
    python -m benchmark.predict --strategies zero2 --compare          # and measure it, with benchmark.compare

The formulas are those of b.15 and b.16 (beyond/cost_model.py), the memory is that of beyond/step_memory.py. What a
worker computes and what a message costs is measured first, on this machine, in some seconds; flags replace what they
name. Without --cores, all workers share this machine, as with cluster.launch and cluster.emulate; with --cores K, each
has one of its own and uses K cores. Far beyond what has been compared, the time is a range: from hidden bytes without
latencies to messages of which nothing is hidden, and the largest error that was seen on either side.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.measure.output import Json
from benchmark.names import MODELS, check_model, command_parser
from beyond.cost_model import seconds
from common.errors import InputError, exit_on_input_error
from common.flags import check_at_least, link_rate, positive
from common.paths import ROOT
from common.workers.machine import own_cores

if TYPE_CHECKING:
    from benchmark.predicted_step import PredictedCell

OFF = "-57 to +133 %"  # of single cells, on a busy machine with 2 cores: README.md
STEPS = 12  # that are measured, with those that warm up


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags; raises InputError if nothing can be measured for them."""
    parser = command_parser("predict", __doc__)
    add = parser.add_argument
    add("--strategies", "--strategy", dest="strategy", default="ddp", help="one, as of benchmark.run (ddp)")
    add("--model", default="gpt2-tiny", help=f"{', '.join(MODELS)}, or a folder (gpt2-tiny)")
    add("--workers", type=positive, default=2, help="2")
    add("--batch_size", type=positive, default=4, help="examples of one worker (4)")
    add("--length", type=int, default=64, help="tokens of an example (64)")
    add("--rate", type=link_rate, help="of every link, such as 1gbit (default: loopback)")
    add("--latency", type=seconds, help="of every message, such as 50us (default: measured)")
    add("--cores", type=positive, help="of each worker's own machine (default: all share this one)")
    what = "of forward and backward of the whole model on one worker, such as 80ms"
    add("--forward_backward", type=seconds, help=f"{what}; an optimizer is left out then (default: both are measured)")
    add("--compare", action="store_true", help="measure the step, too; on loopback")
    flags = parser.parse_args(argv)
    check_at_least(flags, 8, "length")
    check_model("--model", flags.model)
    if flags.cores and flags.workers > 1 and None in (flags.rate, flags.latency):
        raise InputError("--cores: workers with machines of their own have links; add their --rate and --latency")
    cores = len(own_cores())
    if flags.cores and flags.cores > cores and flags.forward_backward is None:
        raise InputError(f"--cores: expected at most {cores}, which can be measured here; or add --forward_backward")
    return flags


def measure(cell: "PredictedCell") -> tuple[float, float, float]:
    """Return the seconds, sent bytes and peak bytes of a step, by benchmark.compare on workers of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--strategies", cell.strategy, "--model", cell.model, "--workers", cell.workers]
        words += ["--batch_size", cell.batch, "--length", cell.length, "--max_steps", STEPS, "--no_cuda"]
        command = [sys.executable, "-m", "benchmark.compare", *map(str, words), "--output_dir", folder]
        if subprocess.run([*command, "--overwrite_output_dir"], cwd=ROOT, stdout=sys.stderr).returncode:
            raise InputError("--compare: benchmark.compare failed; see its output above")
        rows = json.loads(Path(folder, "comparison.json").read_text())["rows"]
    (row,) = (row for row in rows if row["strategy"] == cell.strategy)
    return row["step_ms"] / 1e3, row["sent_bytes"], row["peak_bytes"]


def main() -> None:
    flags = parse(sys.argv[1:])
    from benchmark.measured_costs import costs_of  # here: the flags are checked before torch is loaded
    from benchmark.predicted_step import PredictedCell, check, far, peak_bytes, predict, range_of

    cell = PredictedCell(flags.strategy, flags.model, flags.workers, flags.batch_size, flags.length)
    check(cell)
    costs, doubts = costs_of(cell, flags), far(cell.workers, flags.rate)
    step, peak = predict(cell, costs), peak_bytes(cell)
    least, most = range_of(cell, costs) if doubts else (step.total, step.total)
    link = f"{costs.link.latency * 1e6:.0f} us and {costs.link.bandwidth / 1e6:,.0f} MB/s"
    print(f"{cell.strategy}, {cell.model}, {cell.workers} workers, {cell.batch} x {cell.length} tokens each, {link}")
    print(f"  step                    {least * 1e3:>10.2f} ms" + (f" to {most * 1e3:.2f} ms" if doubts else ""))
    print(f"    forward and backward  {step.computing * 1e3:>10.2f} ms")
    print(f"    exposed communication {step.exposed * 1e3:>10.2f} ms, and {step.hidden * 1e3:.2f} ms are hidden")
    print(f"    optimizer             {step.optimizer * 1e3:>10.2f} ms")
    print(f"  sent by a worker        {step.sent / 1e6:>10.2f} MB")
    print(f"  memory of a worker      {peak / 1e6:>10.2f} MB at the peak of a step")
    print(*doubts, f"times were off by {OFF} when they were last compared; --compare measures this step", sep="\n")
    figures: Json = {"least_s": least, "most_s": most, "step": asdict(step), "peak_bytes": peak}
    if flags.compare:
        measured = measure(cell)
        pairs = zip(("time", "bytes", "memory"), (step.total, step.sent, peak), measured, strict=True)
        figures["errors"] = {name: guess / real - 1 for name, guess, real in pairs if real}
        print("errors here:", ", ".join(f"{name} {error:+.1%}" for name, error in figures["errors"].items()))
    numbers = asdict(costs) if cell.workers > 1 else None
    print(json.dumps({"cell": asdict(cell), **figures, "costs": numbers, "far": doubts}))


if __name__ == "__main__":
    exit_on_input_error(main)
