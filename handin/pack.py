"""Packs the hand-in: code of each task under the course's folder names, the report, its figures and the records of its
runs, and the points.

The same files give the same archive, byte for byte: order, times and modes are fixed. Only what the course lets a
student change is taken, so data, caches and weights stay behind; what is left out is named. Files of the handout
itself, such as the pictures in the READMEs, need no line.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from common.errors import InputError
from course.manifest import read_manifest, version_of
from course.table import Course
from course.zip_files import write_zip
from handin.report import RunReport
from handin.student import Student

LARGEST = 1_000_000  # bytes of one file of code; more is data or weights
RECORDS = ("rank*.json", "traffic_*.json", "timeline.json")
LARGEST_RECORD = 4_000_000  # bytes; of a timeline with a hundred steps, for example
SUFFIXES = {".py", ".md", ".txt", ".toml", ".json", ".yaml", ".yml", ".sh", ".cfg", ".ini"}
SEED = 598  # of the graders' inputs, so that packing twice asks the same questions


def pack(
    tree: Path, course: Course, student: Student, build: Callable[[], RunReport], archive: Path, grade: bool
) -> list[str]:
    """Grade, build the report, write the archive; returns the lines to show."""
    _refuse_existing(archive)
    points = run_graders(tree, course) if grade else None
    report = build()
    files, left_out = _code(tree, course)
    lines = points_table(points, course) if points else ["the graders were not run"]
    lines += [f"missing: {what}" for what, _ in report.findings.missing]
    for file in sorted({region.file for region in course.regions.values()}):
        if archive_name(file, course) not in files:
            lines.append(f"missing: {file} is not in the archive, so its points will be lost")
    lines += [f"suspicious: {doubt}" for doubt in report.findings.doubts]
    lines += [f"left out: {what}" for what in left_out]
    files |= {report.pdf.name: report.pdf.read_bytes(), "report.md": report.markdown.read_bytes()}
    for picture in (report.markdown.parent / "figures").glob("*.png"):
        if f"(figures/{picture.name})".encode() in files["report.md"]:
            files[f"figures/{picture.name}"] = picture.read_bytes()
    files |= _records(report, tree / "submit_figures")
    files |= {path.name: path.read_bytes() for path in sorted(report.markdown.parent.glob("*.json"))}
    if points is not None:
        files["points.json"] = _points_without_messages(points)
    if given := read_manifest(tree):
        files["handout.json"] = json.dumps({"version": version_of(given["code"])}).encode() + b"\n"
    _refuse_existing(archive)  # grading takes minutes
    write_zip(dict(sorted(files.items())), archive)  # it appears only when it is complete
    shown = archive.relative_to(tree) if archive.is_relative_to(tree) else archive
    size = archive.stat().st_size / 1e6
    return [*lines, f"archive of {student.name}: {shown} ({len(files)} files, {size:.2f} MB)"]


def _refuse_existing(archive: Path) -> None:
    if archive.exists() or archive.is_symlink():
        advice = "move it away, or choose another name with --out"
        raise InputError(f"{archive} exists already and is not replaced; {advice}")


def run_graders(tree: Path, course: Course) -> dict[str, Any]:
    """Run the graders of every task once; their report (see grader/report.py).

    Raises:
        InputError: pytest ended without a report of all tests; its last lines are in the message.
    """
    named = dict.fromkeys(file for task in course.tasks.values() for file in (*task.tests, *task.whole))
    tests = [str(tree / file) for file in named if (tree / file).exists()]
    markers = " or ".join(task.marker for task in course.tasks.values())
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "report.json")
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        command += ["-m", markers, f"--report={path}", f"--seed={SEED}", f"--tree={tree}", *tests]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            if done.returncode in (0, 1):  # all passed, or some failed; anything else is a grader that did not get far
                return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass  # said below
    last = done.stdout.decode(errors="replace").strip()[-1500:]
    raise InputError(
        f"the graders ended with exit code {done.returncode} and wrote no complete report; "
        f"use --no-grading to pack without them. Their last output: {last}"
    )


def points_table(report: dict[str, Any], course: Course) -> list[str]:
    """Points of each task, and the regions that did not get all of theirs; bonus tasks below the sum."""
    lines = []
    for task in sorted(course.tasks.values(), key=lambda task: task.id in course.bonus_tasks):
        rows = [row for row in course.regions.values() if row.task == task.id]
        tests = [test for test in report["tests"] if test["task"] == task.id]
        got, most = sum(test["points"] for test in tests), sum(row.points for row in rows)
        extra = sum(row.points for row in rows if row.bonus)
        notes = [f"{extra} of them are bonus, on top of the total"] * (extra > 0)
        notes += [f"{test['region']} {test['status']}" for test in tests if test["status"] != "passed"]
        notes += [f"{row.id} has no grader here" for row in rows if row.id not in {test["region"] for test in tests}]
        lines.append(f"{task.submitted_as:10} {got:3} of {most:3}  {'; '.join(dict.fromkeys(notes))}".rstrip())
    lines.insert(len(course.tasks) - len(course.bonus_tasks), f"{'total':10} {report['score']:3} of {course.total:3}")
    return lines


def _points_without_messages(points: dict[str, Any]) -> bytes:
    """Messages name inputs that are drawn, and times: they would make two archives of the same code differ."""
    tests = [{key: test[key] for key in ("id", "region", "status", "points", "max_points")} for test in points["tests"]]
    sums = {key: points[key] for key in ("score", "max_score", "bonus", "max_bonus") if key in points}
    return json.dumps(sums | {"tests": tests}, indent=1, sort_keys=True).encode() + b"\n"


def _records(report: RunReport, figures: Path) -> dict[str, bytes]:
    """Return the records of the runs that the report shows: whoever grades it compares its numbers with them."""
    paths = {f"submit_figures/{path.name}": path for path in figures.glob("*.json")}
    for run in report.runs:
        paths |= {f"runs/{run.name}/{path.name}": path for name in RECORDS for path in run.folder.glob(name)}
    return {name: path.read_bytes() for name, path in paths.items() if path.stat().st_size <= LARGEST_RECORD}


def archive_name(file: str, course: Course) -> str:
    """Return the name of a file in the archive: task folders get the names that the course asks for."""
    for task in course.tasks.values():
        if file.startswith(f"{task.folder}/"):
            return task.submitted_as + file.removeprefix(task.folder)
    return file


def _code(tree: Path, course: Course) -> tuple[dict[str, bytes], list[str]]:
    """Return name in the archive -> content of all that course.toml lets a student change, and what was left out."""
    files, left_out, given = {}, [], read_manifest(tree).get("files", {})
    for path in _changeable(tree, course):
        name = path.relative_to(tree).as_posix()
        if not (reason := _why_not(path)):
            files[archive_name(name, course)] = path.read_bytes()
        elif path.is_symlink() or sha256(path.read_bytes()).hexdigest() != given.get(name):  # not of the handout
            left_out.append(f"{os.fsencode(name).decode(errors='backslashreplace')} ({reason})")
    return files, left_out


def _changeable(tree: Path, course: Course) -> Iterator[Path]:
    for folder in sorted({pattern.split("/")[0] for pattern in course.may_change}):
        for path in sorted((tree / folder).rglob("*")):
            ours = course.may_student_change(path.relative_to(tree).as_posix()) and "__pycache__" not in path.parts
            if ours and (path.is_symlink() or path.is_file()):
                yield path


def _why_not(path: Path) -> str:
    if path.is_symlink():
        return "a link"
    if path.name.startswith("."):
        return "hidden"
    if any("\udc80" <= character <= "\udcff" for character in str(path)):  # a byte that is no character
        return "its name is not UTF-8"
    if path.suffix not in SUFFIXES:
        return "not code"
    if path.stat().st_size > LARGEST:
        return f"{path.stat().st_size / 1e6:.1f} MB, too large for code"
    return ""
