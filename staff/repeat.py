"""Grade the same submissions several times and check that their reports are equal.

    python -m staff.repeat --times 10 --mistakes 10

Grade the solved tree, the handout and some mistakes --times times with one seed: their reports must be byte-identical.
Grade them once more with another seed: points and statuses must not change. For mistakes marked `race`, only points and
statuses are compared. --task restricts graders and mistakes to one task. Last line of stdout: {"submissions": n,
"runs": n, "different": 0}.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from course.table import load_course
from staff.grade.result_store import HAND_INS
from staff.proofs.bank import Entry, load_bank
from staff.proofs.class_of_submissions import Files, solved_files, write


def mistakes(count: int, task: str | None, draw: random.Random) -> dict[str, Entry]:
    """`count` mistakes (of `task`), drawn; by the names of their submissions."""
    bank = [entry for entry in load_bank() if entry.is_mistake and task in (None, entry.task)]
    chosen = draw.sample(bank, min(count, len(bank)))
    return {f"mistake{number:02}": entry for number, entry in enumerate(chosen, 1)}


def submissions(wrong: dict[str, Entry]) -> dict[str, Files]:
    """The solved tree, the handout, and the solved tree with each of the mistakes."""
    course = load_course()
    found = {"solved": solved_files(course), "handout": solved_files(course, without=list(course.regions))}
    return found | {name: solved_files(course, [entry]) for name, entry in wrong.items()}


def grade(folder: Path, out: Path, seed: int, jobs: int, task: str | None) -> dict[str, bytes]:
    """Every submission's report.json, by name."""
    command = [sys.executable, "-m", "staff.grade", *map(str, sorted(folder.iterdir())), "--out", str(out)]
    command += ["--seed", str(seed), "--jobs", str(jobs)]
    if task:
        command += ["--tests", *load_course().tasks[task].tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"staff.grade failed: {done.stderr[-500:]}")
    return {path.parent.name: path.read_bytes() for path in sorted((out / HAND_INS).glob("*/report.json"))}


def marks(report: bytes) -> list[tuple[str, str, int]]:
    """What must not depend on the seed, nor on who wins a race."""
    return [(test["id"], test["status"], test["points"]) for test in json.loads(report)["tests"]]


def same(left: bytes, right: bytes, with_messages: bool) -> bool:
    return left == right if with_messages else marks(left) == marks(right)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="runs with the same seed (%(default)s)")
    parser.add_argument("--mistakes", type=int, default=10, help="number of mistakes to grade (%(default)s)")
    parser.add_argument("--task", choices=list(load_course().tasks), help="only this task's graders and mistakes")
    parser.add_argument("--jobs", type=int, default=2, help="submissions graded in parallel (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed for choosing mistakes and for the graders' inputs (%(default)s)"
    )
    options = parser.parse_args(argv)
    if options.times < 2:
        raise InputError(f"--times: expected at least 2 runs to compare, got {options.times}")
    wrong = mistakes(options.mistakes, options.task, random.Random(options.seed))
    races = {name for name, mistake in wrong.items() if mistake.race}
    with tempfile.TemporaryDirectory(prefix="cos598d-repeat-") as scratch:
        folder = Path(scratch, "submissions")
        for name, files in submissions(wrong).items():
            write(files, folder / name, "folder", load_course())
        different, runs = set[str](), options.times + 1
        first: dict[str, bytes] = {}
        for number in range(runs):
            seed = options.seed + (number == options.times)  # the last one has another
            reports = grade(folder, Path(scratch, f"run{number}"), seed, options.jobs, options.task)
            first = first or reports
            worded = set(first) - races if seed == options.seed else set()  # messages must be equal, too
            unequal = {name for name in first if not same(first[name], reports[name], name in worded)}
            different |= unequal
            print(f"run {number + 1} of {runs}, seed {seed}: {len(unequal)} of {len(first)} differ", flush=True)
            for name in sorted(unequal):
                show(name, first[name], reports[name], name in worded)
    print(json.dumps({"submissions": len(first), "runs": runs, "different": len(different)}))
    sys.exit(1 if different else 0)


def show(name: str, left: bytes, right: bytes, with_messages: bool) -> None:
    """Print the tests whose results differ; their messages count only where the inputs were the same."""
    for one, other in zip(json.loads(left)["tests"], json.loads(right)["tests"], strict=True):
        keys = ("status", "points", "message")[: 3 if with_messages else 2]
        if any(one[key] != other[key] for key in keys):
            print(
                f"{name} {one['id']}: {one['status']} ({one['message']}), then {other['status']} ({other['message']})"
            )


if __name__ == "__main__":
    exit_on_input_error(main)
