"""Builds a course and grades it as students and instructors will: with pytest, staff.grade and Gradescope's script.

The untouched handout must get 0 points and be "not attempted" everywhere, a solved one all points; nothing may crash.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.paths import ROOT
from course.table import NOT_GRADED_HERE, Course
from staff.grade import result_store
from staff.grade.submissions import clean_files, write_files
from staff.handout.assemble import Handout, renamed, write

OPEN, SOLVED = "untouched", "solved"
COMMANDS = {  # of a student who has solved everything
    "demo": ("-m", "cluster.demo.ladder", "--workers", "2", "--batch", "8", "--iterations", "3"),
    "report": ("submit.py", "report"),
}
UNTRIED = {"not attempted", "skipped", NOT_GRADED_HERE}


@dataclass(frozen=True)
class Trial:
    """One way of grading one hand-in: points that it got, that it should get, and what else was wrong."""

    name: str
    points: int
    expected: int
    wrong: str = ""

    def __str__(self) -> str:
        return f"{'FAILED' if self.wrong else 'ok':6} {self.name:24} {self.points:4} of {self.expected:4}  {self.wrong}"


def run_trials(handout: Handout, course: Course) -> Iterator[Trial]:
    """Build the course in a folder that is removed at the end, and grade it in each way."""
    all_points = sum(region.points for region in course.regions.values())
    with tempfile.TemporaryDirectory(prefix="course-") as temporary:
        folder = Path(temporary)
        write(handout, folder / OPEN)
        solved = {file: renamed(text, course) for file, text in clean_files(solved=course.regions).items()}
        write_files(handout.files | solved, folder / SOLVED)
        hand_ins = {OPEN: 0, SOLVED: all_points}
        for hand_in, points in hand_ins.items():
            report = folder / f"{hand_in}.json"
            options = ["-q", "-p", "no:cacheprovider", "--report", str(report)]
            end = run(folder / hand_in, "-m", "pytest", *options, makes=report)
            tests = [] if end else json.loads(report.read_text(encoding="utf-8"))["tests"]
            yield of_tests(f"pytest, {hand_in}", points, tests, end)
        for name, command in COMMANDS.items():
            yield of_command(name, folder / SOLVED, command)
        graded = folder / "graded"
        paths = [str(folder / hand_in) for hand_in in hand_ins]
        end = run(ROOT, "-m", "staff.grade", *paths, "--out", str(graded), makes=graded / "gradebook.csv")
        for hand_in, points in hand_ins.items():
            tests = [] if end else result_store.read(graded, hand_in).tests
            in_book = 0 if end else _in_grade_book(graded / "gradebook.csv", hand_in)
            trial = of_tests(f"staff.grade, {hand_in}", points, tests, end)
            differs = f"the grade book has {in_book}" if in_book != trial.points else ""
            yield Trial(trial.name, trial.points, trial.expected, trial.wrong or differs)
        archive = folder / "autograder.zip"
        end = run(ROOT, "-m", "staff.gradescope.build", "--out", str(archive), makes=archive)
        for hand_in, points in hand_ins.items():
            yield of_autograder(archive, folder / hand_in, points, end)


def of_tests(name: str, expected: int, tests: Sequence[dict[str, Any]], end: str = "") -> Trial:
    """Judge a report of the graders; `end` says how they ended if they did not grade."""
    here = [test for test in tests if test["status"] != NOT_GRADED_HERE]
    wanted = expected - sum(test["max_points"] for test in tests if test not in here) if expected else 0
    points = sum(test["points"] for test in here)
    right = {"passed"} if expected else UNTRIED
    strange = [f"{test['id'].rpartition('::')[2]} {test['status']}" for test in here if test["status"] not in right]
    wrong = end or ("no test was run" if not tests else ", ".join(strange[:3]))
    return Trial(name, points, wanted, wrong or ("" if points == wanted else "other points than expected"))


def run(folder: Path, *words: str, makes: Path) -> str:
    """Run Python; return how it ended without its file, or with a code other than 0 and 1 (a failed test)."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    return "" if done.returncode in (0, 1) and makes.exists() else _end(done)


def of_command(name: str, tree: Path, words: Sequence[str]) -> Trial:
    """Run a command of the handout; it ends well, and names no script that the handout does not have."""
    done = subprocess.run([sys.executable, *words], cwd=tree, capture_output=True, text=True)
    scripts = dict.fromkeys(re.findall(r"[\w/]+/\w+\.py\b", done.stdout))
    absent = [script for script in scripts if not (tree / script).exists()]
    wrong = _end(done) if done.returncode else f"names {', '.join(absent)}" if absent else ""
    return Trial(f"{name}, {tree.name}", 0, 0, wrong)


def _end(done: subprocess.CompletedProcess[str]) -> str:
    last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
    return f"exit code {done.returncode}: {last}"


def _in_grade_book(path: Path, hand_in: str) -> int:
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return next((int(row["score"]) + int(row["bonus"]) for row in rows if row["submission"] == hand_in), 0)


def of_autograder(archive: Path, hand_in: Path, expected: int, end: str) -> Trial:
    """Unpack the zip as Gradescope does, set up with this Python; grade a hand-in, and judge results.json."""
    name, folder = f"Gradescope, {hand_in.name}", hand_in.parent / f"autograder of {hand_in.name}"
    if end:
        return of_tests(name, expected, [], end)
    source = folder / "source"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(source)
    (source / "run_autograder").chmod(0o755)
    (source / ".python").write_text(sys.executable)
    shutil.copytree(hand_in, folder / "submission")
    (folder / "results").mkdir()
    environment = os.environ | {"TIMEOUT": "1200"}
    done = subprocess.run([source / "run_autograder", folder], env=environment, capture_output=True, text=True)
    if done.returncode:
        return of_tests(name, expected, [], _end(done))
    content = json.loads((folder / "results" / "results.json").read_text(encoding="utf-8"))
    tests = [
        {
            "id": test["name"],
            "status": test["status"] if test["status"] == "passed" else _status(test["output"]),
            "points": test["score"],
            "max_points": test["max_score"],
        }
        for test in content["tests"]
    ]
    return of_tests(name, expected, tests)


def _status(output: str) -> str:
    """The status with which the output of a test begins; "failed" of one that ran."""
    return next((status for status in UNTRIED if output.startswith(status)), "failed")
