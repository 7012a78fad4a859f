"""Grades what you have just saved, and moves on to the next region when one passes.

    python -m grader.watch           # begins with the first open region
    python -m grader.watch 2a.3      # begins with this region
    python -m grader.watch task2b    # begins with the first open region of this task

The process that starts ranks stays loaded, so a verdict comes about a second after a save. In a terminal there are
keys: h shows the next hint, a grades the whole task, q quits. Without a terminal the same lines are printed.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from watchfiles import watch as file_changes

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, cache_dir
from course.next_step import next_region, open_regions, written
from course.table import Course, load_course
from grader import ranks
from grader.plugin import ENTRIES, next_hint
from grader.ranks.running import STARTER
from grader.ranks.zygote_process import ZygoteProcess

KEYS = "h: next hint   a: whole task   q: quit"
OPTIONS = ("-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore:Module already imported:pytest.PytestWarning")
LOOK = 200  # milliseconds between two looks at the keyboard


class OneGrading:
    """A plugin of one pytest run: keeps its verdicts, and the zygote for the next run."""

    def __init__(self) -> None:
        self.zygote: ZygoteProcess | None = None
        self.statuses: dict[str, str] = {}  # test -> status
        self.failed: list[str] = []  # regions, in the order of the course

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Take the zygote out of the way before the graders' plugin ends it."""
        entries = config.stash.get(ENTRIES, {})
        self.statuses = {test: entry.status for test, entry in entries.items()}
        self.failed = [*dict.fromkeys(entry.region for entry in entries.values() if entry.status != "passed")]
        self.zygote = STARTER.take()


class Watch:
    """The region that is watched, and what was written when it was last graded."""

    def __init__(self, course: Course, tree: Path, region: str) -> None:
        self.course, self.tree, self.region = course, tree, region
        self.seen = written(course, tree)
        self.stamps = self.stamps_now()

    def stamps_now(self) -> dict[str, tuple[int, int]]:
        """File with regions -> its time and size. A save in the moment before the watching begins shows here alone."""
        found = {}
        for file in dict.fromkeys(row.file for row in self.course.regions.values()):
            with contextlib.suppress(OSError):  # an editor may take it away for a moment
                stat = (self.tree / file).stat()
                found[file] = (stat.st_mtime_ns, stat.st_size)
        return found

    def grade(self, *selection: str) -> OneGrading:
        """Run graders in this process; return what they found."""
        run = OneGrading()
        try:
            here = [f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests")]
            code = pytest.main([*OPTIONS, *here, f"--tree={self.tree}", *selection], [run])
        finally:
            STARTER.put(run.zygote)
        if code == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt  # pytest has taken Ctrl-C for itself
        return run

    def grade_region(self) -> None:
        """Grade the watched region; when it passes, the next open one is watched."""
        print(f"\n--- {self.region} {self.course.regions[self.region].title}", flush=True)
        run = self.grade("--region", self.region)
        if run.statuses and not run.failed:
            task = self.course.regions[self.region].task
            of_task = {id for id, row in self.course.regions.items() if row.task == task}
            following = next_region(self.course, self.tree, of_task)
            if following and following != self.region:
                self.region = following
                print(f"now watching {following}", flush=True)

    def saved(self) -> None:
        """Grade the region whose lines have changed; the watched one where that cannot be seen."""
        now = written(self.course, self.tree)
        changed = [id for id in now if now[id] != self.seen.get(id)]
        self.seen |= now
        if changed and self.region not in changed:
            self.region = changed[0]
        self.grade_region()

    def grade_task(self, task: str) -> list[str]:
        """Grade all regions of a task; return those that do not pass, in the order of the course."""
        failed = self.grade("-m", self.course.tasks[task].marker).failed
        return [region for region in self.course.in_order_of_needs() if region in failed]

    def begin(self, task: str) -> None:
        """Grade the first region to watch; of a task that is all written, the first one that does not pass."""
        is_open = self.region in open_regions(self.course, self.tree)
        if not task or (is_open and self.course.regions[self.region].task == task):
            return self.grade_region()
        if failed := self.grade_task(task):
            self.region = failed[0]
            print(f"now watching {self.region}", flush=True)
        else:
            print(f"all regions of task {task} pass; watching {self.region}", flush=True)

    def press(self, key: str) -> None:
        """Do what a key asks for."""
        if key == "h":
            print(next_hint(self.course, self.region, cache_dir("hints") / "shown.json"), flush=True)
        elif key == "a":
            self.grade_task(self.course.regions[self.region].task)

    def run(self, task: str = "") -> None:
        """Until q, Ctrl-C or the end of the terminal. task: the one to begin with."""
        folders = sorted({self.tree / row.file.partition("/")[0] for row in self.course.regions.values()})
        there = [folder for folder in folders if folder.is_dir()]
        with keys() as pressed:
            has_keys = sys.stdin.isatty()
            if has_keys:
                print(KEYS, flush=True)  # they work from now on
            self.begin(task)
            if not has_keys:
                print("watching; press Ctrl-C to stop", flush=True)
            for changes in file_changes(*there, debounce=50, step=20, rust_timeout=LOOK, yield_on_timeout=True):
                stamps = self.stamps_now()
                others = any(Path(file).suffix == ".py" for _, file in changes)  # what regions import, for instance
                if others or stamps != self.stamps:
                    self.stamps = stamps
                    self.saved()
                while key := pressed():
                    self.press(key)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[], str]]:
    """A function that returns the next key that was pressed, or "". The terminal is as before when this ends.

    A thread reads the keys, so that q ends a grading that takes long: it is the same as Ctrl-C.
    """
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    fd = os.dup(sys.stdin.fileno())  # pytest puts something else in its place while it runs
    before = termios.tcgetattr(fd)
    waiting: deque[str] = deque()
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            if select.select([fd], [], [], LOOK / 1000)[0]:
                key = os.read(fd, 1).decode(errors="replace")
                if key in ("q", ""):
                    return os.kill(os.getpid(), signal.SIGINT)
                waiting.append(key)

    reader = threading.Thread(target=read, daemon=True)
    try:
        tty.setcbreak(fd)
        reader.start()
        yield lambda: waiting.popleft() if waiting else ""
    finally:
        ended.set()
        reader.join()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        os.close(fd)


def first_region(course: Course, tree: Path, wanted: str) -> tuple[str, str]:
    """The region to begin with, and the task that was asked for, "" if none was.

    Raises:
        InputError: the name is neither a region's nor a task's.
    """
    if wanted in course.regions:
        return wanted, ""
    tasks = [task for task in course.tasks.values() if wanted in (task.id, task.marker, task.folder)]
    if wanted and not tasks:
        raise InputError(f"expected a region or a task, such as 2a.3 or task2a; got {wanted!r}")
    among = [id for id, row in course.regions.items() if not tasks or row.task == tasks[0].id]
    return next_region(course, tree, among if tasks else ()) or among[0], tasks[0].id if tasks else ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grader.watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="", help="a region or a task (default: the first open region)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the folder of your files (default: this repository)")
    arguments = parser.parse_args(argv)
    course, tree = load_course(), arguments.tree.resolve()
    region, task = first_region(course, tree, arguments.what)
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    ranks.start()
    try:
        Watch(course, tree, region).run(task)
    except BaseException:  # what pytest makes of an interrupt depends on where it comes
        if not interrupted.is_set():
            raise
        print()
    finally:
        ranks.stop()


if __name__ == "__main__":
    exit_on_input_error(main)
