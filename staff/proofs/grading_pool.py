"""Runs graders on many trees, one after the other, in worker processes that load torch once.

A fresh pytest for every tree would spend most of its time on importing torch; here the zygote of the graders stays
alive as long as the worker.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common.paths import ROOT, cache_dir
from course.graded_tests import graded_tests, marked
from course.table import NOT_GRADED_HERE, load_course
from grader.ranks.running import STARTER
from grader.report import function_of
from grader.wire.processes import PDEATHSIG, prctl
from staff.grade.hand_ins import grader_files

LONGEST_OUTPUT = 400  # characters
TOO_LONG = 124  # exit code
LIMIT = 300  # seconds for one tree: graders have deadlines of their own, so this ends a broken grader only


class Test(NamedTuple):
    """A grader: its node id for pytest, the student's file and the region that it grades, what it needs."""

    id: str
    file: str
    region: str = ""
    needs: Sequence[str] = ()
    absence: bool = False  # counts only beside the passed tests of its region
    task: str = ""


class GraderResult(NamedTuple):
    """What a test said: its status in the report, and the message of the first of its cases that did not pass."""

    status: str = "passed"
    message: str = ""
    kind: str = ""  # see grader/verdicts.py

    @property
    def outcome(self) -> str:
        return {"passed": "passed", "skipped": "skipped", NOT_GRADED_HERE: "skipped"}.get(self.status, "failed")


@dataclass(frozen=True)
class Graded:
    """What the tests said about one tree, by the names of their functions; the points lost by region; and the warnings,
    which cost nothing."""

    results: dict[str, GraderResult] = field(default_factory=dict)
    points_lost: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)

    @property
    def statuses(self) -> dict[str, str]:
        return {name: result.status for name, result in self.results.items()}


def read(report: Mapping[str, Any]) -> Graded:
    """What a report.json of the graders says."""
    results: dict[str, GraderResult] = {}
    points_lost: dict[str, int] = {}
    for test in report["tests"]:
        name, status, region = function_of(test["id"]), test["status"], test["region"]
        if results.get(name, GraderResult()).status == "passed":
            message = f"{status}: {test['message']} [region {region}, 0 of {test['max_points']}]"
            results[name] = GraderResult(status, message, test["kind"]) if status != "passed" else GraderResult()
        if lost := test["max_points"] - test["points"]:
            points_lost[region] = points_lost.get(region, 0) + lost
    return Graded(results, points_lost, report["warnings"])


def collect() -> tuple[dict[str, Test], dict[str, str]]:
    """Every task's graders, by the names of their functions; and script -> the id of the test of its copies, which
    gives a warning and grades nothing."""
    course = load_course()
    tests = {}
    for id, mark in graded_tests(ROOT, course).items():
        if row := course.regions.get(mark.region):
            tests[function_of(id)] = Test(id, row.file, row.id, mark.needs, mark.absence, row.task)
    marks = (mark for file in grader_files() for mark in marked(ROOT, file, "carried"))
    return tests, {script: id for id, (script, _), _ in marks}


@contextlib.contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Workers, each with a zygote of its own; all that they write is in one folder, removed even if one is killed."""
    with tempfile.TemporaryDirectory(prefix="cos598d-pool-", ignore_cleanup_errors=True) as folder:
        start = functools.partial(begin_work, folder, str(cache_dir("models").parent))
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=start)
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def begin_work(folder: str, cache: str) -> None:
    """In a new worker: where it writes, and the tiny models that all share. It ends with its parent, and with it its
    zygote: it would wait for work for ever."""
    os.environ |= {"TMPDIR": folder, "COS598D_CACHE": cache}
    tempfile.tempdir = folder
    prctl(PDEATHSIG, signal.SIGKILL)


def grade(tree: Path, tests: Sequence[str], seed: int) -> Graded:
    """Run these tests (files or node ids) on the student's files in `tree`, with inputs drawn from `seed`.

    One pytest in this process, silent.

    Raises:
        TimeoutError: after LIMIT seconds.
        RuntimeError: the tests cannot be loaded, or one failed that grades nothing.
    """

    def stop(_signal: int, _frame: object) -> None:
        pytest.exit("too long", returncode=TOO_LONG)  # any other exception would only fail a test

    STARTER.lasts = True
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    code, printed = TOO_LONG, io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["-q", "-p", "no:cacheprovider", "--tb=native", "--report", str(report), "--seed", str(seed)]
        try:
            os.chdir(ROOT)
            silent = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
            with silent[0], silent[1], contextlib.suppress(pytest.exit.Exception):
                code = int(pytest.main([*options, f"--tree={tree}", *tests]))
        finally:
            signal.alarm(0)
        graded = read(json.loads(report.read_text(encoding="utf-8"))) if report.exists() else Graded()
    if code == TOO_LONG:
        raise TimeoutError(f"the graders have not ended after {LIMIT} s")
    a_grader_failed = any(result.outcome == "failed" for result in graded.results.values())
    if code != pytest.ExitCode.OK and not (code == pytest.ExitCode.TESTS_FAILED and a_grader_failed):
        raise RuntimeError(f"pytest ended with {code}: {printed.getvalue()[-LONGEST_OUTPUT:]}")
    return graded
