"""What our own tools cost beside the plain way: each row of timed_rows.py lets a few things take turns and compares.

    python -m benchmark.checks.timings [--only loop,record,pipe,ladder,watchdog] [--rounds 15]

loop       task 1's script beside a bare PyTorch loop that reads and tokenizes by itself: equal losses, ratio
record     a whole run with --timeline beside one without, CPU seconds; what a Record without a timeline adds to a step
pipe       a step of the pipe beside what two cores can do, and beside torch.distributed.pipelining
ladder     one step of 2a, 2b, one flat tensor and DDP, in the same ranks; "DDP again" is the measurement's own error
watchdog   steps with the watchdog of stopped runs beside steps without, CPU seconds, in real ranks

Printed are medians, and the ratio to the row's first entry within a round with its bootstrap interval. Exit code 0 if
every ratio and share that has a limit is within it. --quick takes seconds and judges no times. The last line of stdout
is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch.distributed as dist

from benchmark.checks.ranks import on_ranks
from benchmark.checks.timed_rows import IN_RANKS, ROWS_HERE, Timed
from benchmark.measure.intervals import ratio, shown
from benchmark.measure.machine import environment, machine_line
from benchmark.measure.turns import nothing, take_rounds
from benchmark.names import names_of
from common.config import RunConfig
from common.errors import exit_on_input_error
from common.flags import check_at_least
from common.workers.process_group import Worker

FAILED = "losses or outcomes differ"


def measure(row: Timed, rounds: int, in_ranks: bool = False) -> dict:
    """Let the row's steps take turns; the seconds of each, what else it says, and whether its results are equal."""
    seconds = take_rounds(list(row.steps.values()), rounds, meet=dist.barrier if in_ranks else nothing, clock=row.clock)
    return {
        "names": list(row.steps),
        "seconds": seconds.tolist(),
        "limits": row.limits,
        "shares": row.shares(seconds),
        "equal": row.equal(),
    }


def judged(found: dict) -> dict:
    """Medians, ratios to the first entry with their intervals, and whether the limits hold."""
    seconds, limits = np.array(found["seconds"]), found["limits"]
    figures: dict = {"equal": found["equal"], "shares": found["shares"], "holds": found["equal"]}
    for column, name in enumerate(found["names"]):
        middle, low, high = ratio(seconds[:, column], seconds[:, 0])
        figures[name] = {"seconds": float(np.median(seconds[:, column])), "ratio": [middle, low, high]}
        least, most = limits.get(name, (0.0, float("inf")))
        figures["holds"] &= least <= middle <= most
    figures["holds"] &= all(limits[name][0] <= share <= limits[name][1] for name, share in found["shares"].items())
    return figures


def show(row: str, figures: dict) -> None:
    print(f"\n{row}: ms (median), ratio to the first [95 %]{'' if figures['equal'] else '; ' + FAILED}")
    for name, found in figures.items():
        if isinstance(found, dict) and "ratio" in found:
            print(f"  {name:<34}{found['seconds'] * 1e3:>12.1f}   {shown(found['ratio'])}", flush=True)
    for name, share in figures["shares"].items():
        print(f"  {name:<34}{share:>12.3%}")


def measure_on_rank(config: RunConfig, row: str, rounds: int, quick: bool) -> dict:
    return measure(IN_RANKS[row](config, Worker(config.rank, config.world_size), quick), rounds, in_ranks=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="all", help="rows, separated by commas (all)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="ranks of ladder and watchdog (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, takes seconds; times are not judged")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "rounds", "workers")
    begin, rounds, result, holds = environment(), 1 if arguments.quick else arguments.rounds, {}, True
    for name in names_of("--only", arguments.only, [*ROWS_HERE, *IN_RANKS]):
        if name in IN_RANKS:
            found = on_ranks(measure_on_rank, arguments.workers, row=name, rounds=rounds, quick=arguments.quick)[0]
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(ROWS_HERE[name](Path(folder), arguments.quick), rounds)
        result[name] = judged(found)
        show(name, result[name])
        holds &= result[name]["equal"] if arguments.quick else result[name]["holds"]
    print(machine_line(begin))
    print(json.dumps({"holds": holds, **result, "environment": begin}))
    sys.exit(not holds)


if __name__ == "__main__":
    exit_on_input_error(main)
