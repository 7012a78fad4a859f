"""Worker processes that run graders on many trees, one after the other, with torch loaded once.

A fresh pytest for every tree would spend most of its time on importing torch; here the zygote of the graders stays
alive as long as the worker.
"""

import contextlib
import functools
import gc
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest

from common.paths import ROOT, cache_dir
from course.graded_tests import graded_tests, marked
from course.table import NOT_GRADED_HERE, load_course
from grader.ranks.running import STARTER
from staff.grade.hand_ins import grader_files
from staff.sandbox import kernel

T = TypeVar("T")
LONGEST_OUTPUT = 400  # characters
LIMIT = 300  # seconds for one tree: graders have deadlines of their own, so this ends a broken grader only


class Test(NamedTuple):
    """A grader: its node id for pytest, the student's file and the region that it grades, what it needs."""

    id: str
    file: str
    region: str = ""
    needs: Sequence[str] = ()
    absence: bool = False  # counts only beside the passed tests of its region
    task: str = ""


class Result(NamedTuple):
    """What a test said: its status in the report, and the message of the first of its cases that did not pass."""

    status: str = "passed"
    message: str = ""

    @property
    def outcome(self) -> str:
        return {"passed": "passed", "skipped": "skipped", NOT_GRADED_HERE: "skipped"}.get(self.status, "failed")


@dataclass(frozen=True)
class Graded:
    """What the tests said about one tree, by the names of their functions; the points lost by region; and the warnings,
    which cost nothing."""

    results: dict[str, Result] = field(default_factory=dict)
    points_lost: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)

    @property
    def statuses(self) -> dict[str, str]:
        return {name: result.status for name, result in self.results.items()}


class OneRun:
    """A pytest plugin that reads the report of the graders' plugin at the end of a run."""

    def __init__(self) -> None:
        self.graded = Graded()
        self.too_long = False

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        plugin: Any = session.config.pluginmanager.get_plugin("grader.plugin")
        results, points_lost = self.graded.results, self.graded.points_lost
        for entry in session.config.stash[plugin.ENTRIES].values():
            name = function_of(entry.id)
            if results.get(name, Result()).status == "passed":
                message = f"{entry.status}: {entry.message} [region {entry.region}, 0 of {entry.max_points}]"
                results[name] = Result(entry.status, message if entry.status != "passed" else "")
            if lost := entry.max_points - entry.points:
                points_lost[entry.region] = points_lost.get(entry.region, 0) + lost
        self.graded.warned.extend(session.config.stash[plugin.WRITTEN].warnings)


def function_of(nodeid: str) -> str:
    """The name of a test without its file and its case."""
    return nodeid.rpartition("::")[2].split("[")[0]


class GradingPool:
    """Runs functions in worker processes, one at a time in each: what ends its process costs no other its result."""

    def __init__(self, count: int) -> None:
        self.threads = ThreadPoolExecutor(count)
        self.idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        for _ in range(count):
            self.idle.put(one_process())

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        return self.threads.submit(self._run, function, *arguments)

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        process = self.idle.get()
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            process = one_process()
            raise
        finally:
            self.idle.put(process)

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        while not self.idle.empty():
            self.idle.get().shutdown()


def one_process() -> ProcessPoolExecutor:
    process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=die_with_parent)
    process.submit(os.getpid)  # starts it now: it dies with the thread that starts it
    return process


@contextlib.contextmanager
def worker_processes(count: int) -> Iterator[GradingPool]:
    """`count` workers, each with a zygote of its own; the cache of tiny models is shared. With them goes the folder of
    all that they write, even if one is killed."""
    os.environ.setdefault("COS598D_CACHE", str(cache_dir("models").parent))  # spawned workers inherit it
    with (
        tempfile.TemporaryDirectory(prefix="cos598d-pool-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, {"TMPDIR": folder}),
        contextlib.closing(GradingPool(count)) as pool,
    ):
        yield pool


def die_with_parent() -> None:
    """A worker whose parent is killed would wait for work for ever; with it ends its zygote."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)


@functools.cache
def folder_of_trees() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cos598d-trees-")


@contextlib.contextmanager
def tree_folder() -> Iterator[Path]:
    """An empty folder for one tree at a time; in one process it has the same name each time, so that the zygote imports
    common/ once for all trees, see grader/given_files.py."""
    folder = Path(folder_of_trees().name, "tree")
    folder.mkdir()
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

    One pytest in this process, silent.

    Raises:
        TimeoutError: after LIMIT seconds.
        RuntimeError: the tests cannot be loaded, or one failed that grades nothing.
    """
    watch, printed = OneRun(), io.StringIO()

    def stop(_signal: int, _frame: object) -> None:
        watch.too_long = True
        pytest.exit(f"the graders have not ended after {LIMIT} s")  # any other exception would only fail a test

    STARTER.lasts = True
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    code: int | None = None
    try:
        os.chdir(ROOT)
        silent = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
        with silent[0], silent[1], contextlib.suppress(pytest.exit.Exception):
            options = ["-q", "-p", "no:cacheprovider", "--tb=native", f"--tree={tree}", "--seed", str(seed)]
            code = pytest.main([*options, *tests], plugins=[watch])
    finally:
        signal.alarm(0)
        if not gc.get_freeze_count():
            gc.freeze()  # torch and pytest stay: pytest ends each run with two collections, which skip them now
    if watch.too_long:
        raise TimeoutError(f"the graders have not ended after {LIMIT} s")
    a_grader_failed = any(result.outcome == "failed" for result in watch.graded.results.values())
    if code != pytest.ExitCode.OK and not (code == pytest.ExitCode.TESTS_FAILED and a_grader_failed):
        raise RuntimeError(f"pytest ended with {code}: {printed.getvalue()[-LONGEST_OUTPUT:]}")
    return watch.graded
