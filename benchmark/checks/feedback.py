"""How long a person waits: for the graders of one region, for a wrong flag, for the report of an infinite loop.

    python -m benchmark.checks.feedback [--rounds 5] [--quick]
    python -m benchmark.checks.feedback --watch [--quick]

One region of each task is graded by a fresh pytest, in the solved repository and in a handout whose regions are solved.
Every command answers --help, a wrong flag and a wrong value; that of a task script is compared with importing torch and
transformers, in turns. Then each of those regions loops forever. Medians of wall time; run it on a quiet machine.
--watch: instead of all that, the time from a save to the verdict of grader.watch (feedback_watch.py).
--quick: one round, one region, two commands, one loop; with --watch two saves in one region. Last line of stdout: one
JSON object; exit code 0 if every goal is met.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmark.checks import feedback_watch
from benchmark.checks.feedback_commands import LIGHT, TRAINING, Command, lines
from common.paths import ROOT
from course.table import load_course
from staff.handout.assemble import assemble, write
from staff.handout.regions import replace_in_tree
from staff.proofs.bank import copy_tree

REGIONS = ("1.2", "2a.3", "2b.1", "3.1", "4.1", "p.4", "b.1")  # one of each task
QUICK_REGIONS = ("p.2",)
QUICK_COMMANDS = (LIGHT[0], TRAINING[0])
MOST_HANDOUT, MOST_REPOSITORY, MOST_LOOP, MOST_LIGHT = 4.0, 5.0, 25.0, 0.5  # seconds
MOST_TRAINING = 1.3  # times the import of torch and transformers
IMPORTS = [sys.executable, "-c", "import torch, transformers"]
LOOP = "while True:\n    pass"
PATIENCE = 600  # seconds


def seconds(command: Sequence[str], folder: Path, expected: Iterable[int]) -> float:
    """Wall time of a command; raises RuntimeError if it ends otherwise than expected."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COS598D_SLOWNESS")}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    took = time.perf_counter() - start
    if done.returncode not in expected:
        said = (done.stdout + done.stderr).strip()[-500:]
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {said}")
    return took


def pytest_of(region: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "--region", region, *options]


def grade_regions(regions: Iterable[str], handout: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Region -> median seconds of its graders, cold, in the handout and in the repository."""
    places = {"handout": handout, "repository": ROOT}
    found = {}
    for region in regions:
        times: dict[str, list[float]] = {place: [] for place in places}
        for _ in range(rounds):
            for place, folder in places.items():
                times[place].append(seconds(pytest_of(region), folder, [0]))
        found[region] = {place: statistics.median(taken) for place, taken in times.items()}
        print(f"region {region:<5} handout {found[region]['handout']:6.2f} s   repository", end=" ")
        print(f"{found[region]['repository']:6.2f} s", flush=True)
    return found


def answer(commands: Iterable[Command], rounds: int, against: str = "") -> dict[str, float]:
    """Command line -> median seconds until it has ended; `against` imports: times as long as those, in turns."""
    found = {}
    for command in commands:
        for line, code in zip(lines(command), (0, 2, 2), strict=True):
            taken = []
            for _ in range(rounds):
                base = seconds(IMPORTS, ROOT, [0]) if against else 1.0
                taken.append(seconds([sys.executable, *line], ROOT, [code]) / base)
            found[" ".join(line)] = statistics.median(taken)
            print(f"{found[' '.join(line)]:6.2f} {against or 's'}   {' '.join(line)}", flush=True)
    return found


def loop_for_ever(regions: Iterable[str]) -> dict[str, float]:
    """Region -> seconds until its graders have reported that it never ends."""
    course, found = load_course(), {}
    for region in regions:
        with tempfile.TemporaryDirectory(prefix="cos598d-feedback-") as folder:
            copy_tree(Path(folder))
            replace_in_tree(Path(folder), course.regions[region].file, region, LOOP)
            found[region] = seconds(pytest_of(region, f"--tree={folder}"), ROOT, [1])
        print(f"region {region:<5} infinite loop reported after {found[region]:6.2f} s", flush=True)
    return found


def solved_handout(folder: Path) -> Path:
    """The handout as a student has it in the end: every region solved."""
    write(assemble(ROOT, solved=list(load_course().regions)), folder / "handout")
    return folder / "handout"


def watch(handout: Path, quick: bool) -> dict:
    """The figures of --watch."""
    regions = feedback_watch.REGIONS[-1:] if quick else feedback_watch.REGIONS
    count = 2 if quick else feedback_watch.SAVES
    return {"saves": count, "watch": feedback_watch.saves(handout, regions, count)}


def verdicts(figures: dict) -> dict[str, bool]:
    """Which goals are met."""
    if "watch" in figures:
        return {"watch": all(row["seconds"] <= feedback_watch.MOST_SECONDS for row in figures["watch"].values())}
    regions = figures["regions"].values()
    return {
        "handout": all(row["handout"] <= MOST_HANDOUT for row in regions),
        "repository": all(row["repository"] <= MOST_REPOSITORY for row in regions),
        "commands": all(value <= MOST_LIGHT for value in figures["commands"].values()),
        "task_scripts": all(value <= MOST_TRAINING for value in figures["task_scripts"].values()),
        "loops": all(value <= MOST_LOOP for value in figures["loops"].values()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, one region, two commands, one loop")
    parser.add_argument("--watch", action="store_true", help="time from a save to grader.watch's verdict only")
    options = parser.parse_args(argv)
    rounds = 1 if options.quick else options.rounds
    regions = QUICK_REGIONS if options.quick else REGIONS
    light = QUICK_COMMANDS[:1] if options.quick else LIGHT
    training = QUICK_COMMANDS[1:] if options.quick else TRAINING
    place = Path(tempfile.mkdtemp(prefix="cos598d-feedback-"))
    try:
        figures: dict = (
            watch(solved_handout(place), options.quick)
            if options.watch
            else {
                "rounds": rounds,
                "regions": grade_regions(regions, solved_handout(place), rounds),
                "commands": answer(light, rounds),
                "task_scripts": answer(training, rounds, "x import torch, transformers"),
                "loops": loop_for_ever(regions),
            }
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    figures["met"] = verdicts(figures)
    print(json.dumps(figures))
    sys.exit(0 if all(figures["met"].values()) else 1)


if __name__ == "__main__":
    main()
