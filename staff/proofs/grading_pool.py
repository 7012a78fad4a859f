"""Worker processes that run graders on many trees, one after the other, with torch loaded once.

A fresh pytest for every tree would spend most of its time on importing torch; here the zygote of the graders stays
alive as long as the worker.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from common.paths import ROOT, cache_dir
from course.graded_tests import graded_tests, marked
from course.table import load_course
from grader.ranks.running import STARTER
from staff.grade.hand_ins import grader_files
from staff.sandbox import kernel

ROOM = 64 << 20  # bytes; a tree has 2 MiB
TREES = "COS598D_TREES"  # variable with the folder of the trees
LIMIT = 300  # seconds for one tree: graders have deadlines of their own, so this ends a broken grader only


class Test(NamedTuple):
    """A grader: its node id for pytest, the student's file and the region that it grades, what it needs."""

    id: str
    file: str
    region: str = ""
    needs: Sequence[str] = ()
    absence: bool = False  # counts only beside the passed tests of its region
    task: str = ""


@dataclass(frozen=True)
class Result:
    """What a test said: passed, failed or skipped; the message of the first of its cases that failed."""

    outcome: str
    message: str = ""


@dataclass(frozen=True)
class Graded:
    """What the tests said about one tree, by name, and their status in the report; the points lost by region; and the
    warnings, which cost nothing."""

    results: dict[str, Result] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    points_lost: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)


class OneRun:
    """A pytest plugin that keeps the results of the tests, by the name of their function."""

    def __init__(self) -> None:
        self.graded = Graded()
        self.too_long = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = function_of(report.nodeid)
        results = self.graded.results
        result = results.get(name, Result("passed"))
        if report.outcome != "passed" and result.outcome != "failed":
            results[name] = Result(report.outcome, _message(report.longrepr))
        elif report.when == "call":
            results.setdefault(name, Result("passed"))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if grader := session.config.pluginmanager.get_plugin("grader.plugin"):
            for entry in session.config.stash[grader.ENTRIES].values():
                self.graded.statuses[function_of(entry.id)] = entry.status
                if lost := entry.max_points - entry.points:
                    self.graded.points_lost[entry.region] = self.graded.points_lost.get(entry.region, 0) + lost
            self.graded.warned.extend(session.config.stash[grader.WRITTEN].warnings)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.graded.results[report.nodeid] = Result("failed", _message(report.longrepr))


def function_of(nodeid: str) -> str:
    """The name of a test without its file and its case."""
    return nodeid.rpartition("::")[2].split("[")[0]


def _message(longrepr: object) -> str:
    if isinstance(longrepr, tuple):  # (file, line, reason) of a skipped test
        return str(longrepr[2])
    crash = getattr(longrepr, "reprcrash", None)
    return str(crash.message if crash else longrepr).strip()


@contextlib.contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """`count` workers, each with a zygote of its own; the cache of tiny models is shared. With them goes the folder of
    all that they write, even if one is killed."""
    os.environ.setdefault("COS598D_CACHE", str(cache_dir("models").parent))  # spawned workers inherit it
    with (
        tempfile.TemporaryDirectory(prefix="cos598d-pool-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(
            prefix="cos598d-trees-", dir=in_memory(folder), ignore_cleanup_errors=True
        ) as trees,
        mock.patch.dict(os.environ, {"TMPDIR": folder, TREES: trees}),
        ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=die_with_parent) as pool,
    ):
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def in_memory(otherwise: str) -> str:
    """A file system in memory, where there is one: writing and removing the hundred files of a tree can take a tenth of
    a second on a disk, half as long as grading it."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > ROOM else otherwise


def die_with_parent() -> None:
    """A worker whose parent is killed would wait for work for ever; with it ends its zygote."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def tree_folder() -> Iterator[Path]:
    """An empty folder for one tree at a time; in one process it has the same name each time, if it can. So the zygote
    has to import common/ once for all trees, see grader/given_files.py."""
    around = os.environ.get(TREES) or in_memory(tempfile.gettempdir())
    folder = Path(around, f"cos598d-tree-{os.getpid()}")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        folder = Path(tempfile.mkdtemp(prefix="cos598d-tree-", dir=around))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


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


def grade(tree: Path, tests: Sequence[str], seed: int) -> Graded:
    """Run these tests (files or node ids) on the student's files in `tree`, with inputs drawn from `seed`.

    One pytest in this process, silent. Raises TimeoutError after LIMIT seconds.
    """
    watch = OneRun()

    def stop(_signal: int, _frame: object) -> None:
        watch.too_long = True
        pytest.exit(f"the graders have not ended after {LIMIT} s")  # any other exception would only fail a test

    STARTER.lasts = True
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        os.chdir(ROOT)
        silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with silent[0], silent[1], contextlib.suppress(pytest.exit.Exception):
            options = ["-q", "-p", "no:cacheprovider", "--tb=native", f"--tree={tree}", "--seed", str(seed)]
            pytest.main([*options, *tests], plugins=[watch])
    finally:
        signal.alarm(0)
        if not gc.get_freeze_count():
            gc.freeze()  # torch and pytest stay: pytest ends each run with two collections, which skip them now
    if watch.too_long:
        raise TimeoutError(f"the graders have not ended after {LIMIT} s")
    return watch.graded
