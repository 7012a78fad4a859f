"""What the graders cost: a test on four ranks through the zygote and through spawn, and a whole run of tasks 1 to 3.

    python -m benchmark.checks.grader_speed [--rounds 5] [--repeat 1] [--quick]

The two ways run the same student's function on the same gradients, in turns, so that a machine whose speed drifts slows
both. The whole run is pytest on the solved tree; its memory is the proportional set size (PSS) of all its processes,
where a page that n processes share counts 1/n in each. --repeat runs all graders N times, each time with fresh random
inputs. Last line of stdout: one JSON object; exit code 0 if the limits below hold and all outcomes are identical.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmark.measure.intervals import interval
from common.paths import ROOT, import_file
from course.table import load_course
from grader import ranks
from grader.in_rank import PROBE
from grader.wire import drawn
from tests.gradients import test_averaging as averaging

WORLD_SIZE, SEED = 4, 1
FILE = "task2b_allreduce/run_glue.py"
GRADIENTS = [drawn.gradients(SEED, rank, list(drawn.SHAPES)) for rank in range(WORLD_SIZE)]
EACH = [{"gradients": [own], "weight": drawn.weight(rank)} for rank, own in enumerate(GRADIENTS)]  # one call
SETTING = {"shapes": drawn.SHAPES, "frozen": [], "tied": False, "dtype": "float32", "calls": averaging.SYNC}
ARGUMENTS = averaging.average.arguments() | SETTING | {"file": FILE, "each": EACH}
LEAST_RATIO, MOST_SECONDS, MOST_MIB, MOST_DEADLOCK = 10.0, 45.0, 768.0, 1.0
PAUSE = 0.05  # seconds between two looks at the memory
DEADLOCK = """
import torch, torch.distributed as dist

def go(context):
    context.join()
    if context.rank != 1:
        dist.all_reduce(torch.ones(1))
"""


def through_zygote() -> list[np.ndarray]:
    """The gradients that rank 0 is left with, by the graders' own way."""
    left = ranks.run(PROBE, WORLD_SIZE, ARGUMENTS).values[0][0]
    return [left[f"parameter {k}"] for k in range(len(drawn.SHAPES))]


def through_spawn(folder: Path) -> list[np.ndarray]:
    """The same by torch.multiprocessing.spawn: four fresh interpreters, gloo on loopback."""
    import torch.multiprocessing

    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    torch.multiprocessing.spawn(spawned, args=(str(folder),), nprocs=WORLD_SIZE)
    with np.load(folder / "grads.npz") as saved:
        return [saved[f"arr_{number}"] for number in range(len(drawn.SHAPES))]


def spawned(rank: int, folder: str) -> None:
    """One rank of the other way: load torch and the student's file, join, average, let rank 0 save what it has."""

    import torch
    import torch.distributed as dist

    task = import_file(ROOT / FILE, "student")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in drawn.SHAPES])
    for parameter, gradient in zip(model, GRADIENTS[rank], strict=True):
        parameter.grad = torch.from_numpy(gradient)
    task.sync_gradients(model, WORLD_SIZE)
    if rank == 0:
        np.savez(f"{folder}/grads.npz", *[parameter.grad.numpy() for parameter in model])
    dist.destroy_process_group()


def compare(rounds: int) -> dict[str, Any]:
    """Both ways in turns; seconds of each, and the ratio of the rounds with its 95 % interval."""
    through_zygote()  # the zygote loads torch once, before the first test
    seconds: dict[str, list[float]] = {"zygote": [], "spawn": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            got = {}
            for name, run in (("zygote", through_zygote), ("spawn", lambda: through_spawn(Path(folder)))):
                begin = time.perf_counter()
                got[name] = run()
                seconds[name].append(time.perf_counter() - begin)
            for one, other in zip(got["zygote"], got["spawn"], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    ratio, low, high = interval(np.divide(seconds["spawn"], seconds["zygote"]))
    medians = {f"{name}_seconds": round(float(np.median(values)), 3) for name, values in seconds.items()}
    return medians | {"ratio": round(ratio, 1), "ratio_interval": [round(low, 1), round(high, 1)]}


def deadlock_seconds() -> float:
    """From the start of four ranks to the report that three of them wait for one that has left."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.py").write_text(DEADLOCK)
        begin = time.perf_counter()
        result = ranks.run("grader.inside.context:call", WORLD_SIZE, {"file": "run.py", "function": "go"}, tree=folder)
        seconds = time.perf_counter() - begin
    assert result.outcome == "deadlock", result.explain()
    return round(seconds, 3)


def grader_files(quick: bool) -> list[str]:
    """The graders of tasks 1 to 3, and those of the whole ladder; those of task 1 alone if it must be quick."""
    tasks = load_course().tasks
    if quick:
        return list(tasks["1"].tests)
    files = [file for task in ("1", "2a", "2b", "3") for file in tasks[task].tests]
    return list(dict.fromkeys([*files, "tests/test_ladder.py"]))


def grade_all(files: list[str]) -> tuple[float, float, dict[str, str]]:
    """One pytest run of these graders: seconds, peak PSS in MiB, status of every test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--report", str(report)]
        begin = time.perf_counter()
        run = subprocess.Popen([*command, *files], cwd=ROOT, stdout=subprocess.DEVNULL)
        peak = 0.0
        while run.poll() is None:
            peak = max(peak, pss(run.pid))
            time.sleep(PAUSE)
        seconds = time.perf_counter() - begin
        tests = json.loads(report.read_text())["tests"]
    return seconds, peak / 2**20, {test["id"]: test["status"] for test in tests}


def pss(pid: int) -> float:
    """Proportional set size of a process and all below it, in bytes; who ends meanwhile counts nothing."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
                total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the zygote/spawn comparison (%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="how often to run all graders (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, takes seconds; time limits are not checked"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds = 1
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = compare(options.rounds) | {"deadlock_seconds": deadlock_seconds()}
    ranks.stop()  # its memory is not that of the run below
    print("four ranks: zygote {zygote_seconds} s, spawn {spawn_seconds} s, {ratio} times as long".format(**figures))
    runs = []
    for number in range(options.repeat):
        runs.append(grade_all(grader_files(options.quick)))
        passed = sum(status == "passed" for status in runs[-1][2].values())
        print(f"run {number + 1}: {runs[-1][0]:.1f} s, {runs[-1][1]:.0f} MiB, {passed} of {len(runs[-1][2])} passed")
    all_passed = all(set(statuses.values()) == {"passed"} for _, _, statuses in runs)
    figures |= {
        "graders_seconds": round(float(np.median([seconds for seconds, _, _ in runs])), 1),
        "graders_pss_mib": round(max(peak for _, peak, _ in runs)),
        "tests": len(runs[0][2]),
        "runs": len(runs),
        "all_passed": all_passed,
        "identical": all(statuses == runs[0][2] for _, _, statuses in runs),
    }
    print(json.dumps(figures))
    within = figures["graders_seconds"] < MOST_SECONDS and figures["graders_pss_mib"] < MOST_MIB
    fast = figures["ratio"] >= LEAST_RATIO and figures["deadlock_seconds"] < MOST_DEADLOCK
    sys.exit(0 if (options.quick or (within and fast)) and all_passed and figures["identical"] else 1)


if __name__ == "__main__":
    main()
