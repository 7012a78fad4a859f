"""What our own tools cost beside the plain way: each row of timed_rows.py lets a few things take turns and compares.

    python -m benchmark.checks.timings [--only loop,record,graders,commands,ladder,watchdog] [--rounds 15]

loop       task 1's script beside a bare PyTorch loop that reads and tokenizes by itself: equal losses, ratio
record     a whole run with --timeline beside one without, CPU seconds; what a Record without a timeline adds to a step
graders    a test on four ranks through the zygote beside torch.multiprocessing.spawn
commands   the graders of a region, --help, and the import of torch and transformers: what a student waits for
ladder     one step of 2a, 2b, one flat tensor and DDP, in the same ranks; "DDP again" is the measurement's own error
watchdog   steps with the watchdog of stopped runs beside steps without, CPU seconds, in real ranks

Printed are medians, and the ratio to the row's first entry within a round with its bootstrap interval. Exit code 0 if
every ratio and share that has a limit is within it. --quick takes seconds and judges no times. The last line of stdout
is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it also starts as a script, on every rank
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import numpy as np
import torch.distributed as dist

from benchmark.checks.timed_ranks import IN_RANKS
from benchmark.checks.timed_rows import ROWS, Timed
from benchmark.measure.intervals import ratio, shown
from benchmark.measure.machine import environment, machine_line
from benchmark.measure.turns import take_rounds
from benchmark.names import names_of
from common.arguments import parse_worker_arguments
from common.errors import exit_on_input_error
from common.flags import check_at_least
from common.paths import ROOT, atomic_write
from common.workers.collectives import turn_on_recorder
from common.workers.process_group import Worker, choose_interface
from common.workers.roll_call import call_the_roll

FAILED = "losses or outcomes differ"


def measure(row: Timed, rounds: int, in_ranks: bool = False) -> dict:
    """Let the row's steps take turns; the seconds of each, what else it says, and whether its results are equal."""
    seconds = take_rounds(
        list(row.steps.values()), rounds, meet=dist.barrier if in_ranks else lambda: None, clock=row.clock
    )
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
    figures["holds"] &= all(share <= limits[name][1] for name, share in found["shares"].items())
    return figures


def show(row: str, figures: dict) -> None:
    print(f"\n{row}: ms (median), ratio to the first [95 %]{'' if figures['equal'] else '; ' + FAILED}")
    for name, found in figures.items():
        if isinstance(found, dict) and "ratio" in found:
            print(f"  {name:<34}{found['seconds'] * 1e3:>12.1f}   {shown(found['ratio'])}", flush=True)
    for name, share in figures["shares"].items():
        print(f"  {name:<34}{share:>12.3%}")


def on_ranks(row: str, rounds: int, workers: int, quick: bool) -> dict:
    """Measure a row whose steps are those of `workers` ranks of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--as_rank", row, str(rounds), str(int(quick)), folder]
        command = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), "--", __file__, *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        return json.loads((Path(folder) / "found.json").read_text())  # type: ignore[no-any-return]


def rank_main() -> None:
    """One rank, without a watchdog of its own, since that is measured; rank 0 writes what was found."""
    name, rounds, quick, out = sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1", Path(sys.argv[5])
    config = parse_worker_arguments("benchmark_timings", ["--output_dir", str(out), *sys.argv[6:]])
    turn_on_recorder()
    choose_interface(config.master_ip)
    call_the_roll(config)
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=config.rank, world_size=config.world_size)
    found = measure(IN_RANKS[name](config, Worker(config.rank, config.world_size), quick), rounds, in_ranks=True)
    if config.rank == 0:
        with atomic_write(out / "found.json") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="all", help="rows, separated by commas (all)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="ranks of ladder and watchdog (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, takes seconds; times are not judged")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "rounds", "workers")
    begin, rounds, result, holds = environment(), 1 if arguments.quick else arguments.rounds, {}, True
    for name in names_of("--only", arguments.only, [*ROWS, *IN_RANKS]):
        if name in IN_RANKS:
            found = on_ranks(name, rounds, arguments.workers, arguments.quick)
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(ROWS[name](Path(folder), arguments.quick), rounds)
        result[name] = judged(found)
        show(name, result[name])
        holds &= result[name]["equal"] if arguments.quick else result[name]["holds"]
    print(machine_line(begin))
    print(json.dumps({"holds": holds, **result, "environment": begin}))
    sys.exit(not holds)


if __name__ == "__main__":
    exit_on_input_error(rank_main if sys.argv[1:2] == ["--as_rank"] else main)
