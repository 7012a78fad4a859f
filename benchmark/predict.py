"""Predict a step before it is run: its time with parts, the bytes that a worker sends, the memory that it needs.

    python -m benchmark.predict --strategies ddp --workers 4 --rate 1gbit
    python -m benchmark.predict --strategies own_zero3 --model gpt2 --workers 8 --rate 10gbit --latency 50us --cores 2
    python -m benchmark.predict --compare        # rewrites compared_steps.csv: measured steps beside their predictions

The formulas are those of b.15 and b.16 (beyond/cost_model.py), the memory is that of beyond/step_memory.py. What a
worker computes and what a message costs is measured first, on this machine, in some seconds; flags replace what they
name. Without --cores, all workers share this machine, as with cluster.launch and cluster.emulate; with --cores K, each
has one of its own and uses K cores. Far beyond the cells of compared_steps.csv, the time is a range: from hidden bytes
without latencies to messages of which nothing is hidden, and the largest error that was seen on either side.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import sys
from dataclasses import asdict

from benchmark.names import MODELS, check_model, command_parser
from beyond.cost_model import seconds
from common.errors import InputError, exit_on_input_error
from common.flags import check_at_least, link_rate, positive


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
    add("--compare", action="store_true", help="measure some cells beside their predictions; other flags do not count")
    flags = parser.parse_args(argv)
    check_at_least(flags, 8, "length")
    check_model("--model", flags.model)
    if flags.cores and flags.workers > 1 and None in (flags.rate, flags.latency):
        raise InputError("--cores: workers with machines of their own have links; add their --rate and --latency")
    cores = len(os.sched_getaffinity(0))
    if flags.cores and flags.cores > cores and flags.forward_backward is None:
        raise InputError(f"--cores: expected at most {cores}, which can be measured here; or add --forward_backward")
    return flags


def main() -> None:
    flags = parse(sys.argv[1:])
    from benchmark import compared_steps  # here: the flags are checked before torch is loaded
    from benchmark.measured_costs import costs_of
    from benchmark.predicted_memory import peak_bytes
    from benchmark.predicted_step import PredictedCell, check, predict, range_of

    if flags.compare:
        print(json.dumps(compared_steps.compare(parse)))
        return
    cell = PredictedCell(flags.strategy, flags.model, flags.workers, flags.batch_size, flags.length)
    check(cell)
    costs, far = costs_of(cell, flags), compared_steps.far(cell.workers, flags.rate)
    step, (error, errors) = predict(cell, costs), compared_steps.errors(cell.strategy)
    least, most = range_of(cell, costs, error) if far else (step.total, step.total)
    peak = peak_bytes(cell.strategy, cell.model, cell.workers, cell.batch, cell.length)
    link = f"{costs.link.latency * 1e6:.0f} us and {costs.link.bandwidth / 1e6:,.0f} MB/s"
    print(f"{cell.strategy}, {cell.model}, {cell.workers} workers, {cell.batch} x {cell.length} tokens each, {link}")
    print(f"  step                    {least * 1e3:>10.2f} ms" + (f" to {most * 1e3:.2f} ms" if far else ""))
    print(f"    forward and backward  {step.computing * 1e3:>10.2f} ms")
    print(f"    exposed communication {step.exposed * 1e3:>10.2f} ms, and {step.hidden * 1e3:.2f} ms are hidden")
    print(f"    optimizer             {step.optimizer * 1e3:>10.2f} ms")
    print(f"  sent by a worker        {step.sent / 1e6:>10.2f} MB")
    print(f"  memory of a worker      {peak / 1e6:>10.2f} MB at the peak of a step")
    print(*far, errors, sep="\n")
    figures = {"least_s": least, "most_s": most, "step": asdict(step), "peak_bytes": peak}
    numbers = asdict(costs) if cell.workers > 1 else None
    print(json.dumps({"cell": asdict(cell), **figures, "costs": numbers, "far": far}))


if __name__ == "__main__":
    exit_on_input_error(main)
