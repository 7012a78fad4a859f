"""Grades what you have just saved, and moves on to the next region when one passes.

    python -m grader.watch           # begins with the first open region
    python -m grader.watch REGION    # begins with this region
    python -m grader.watch TASK      # begins with the first open region of this task

The process that starts ranks stays loaded, so a verdict comes about a second after a save. In a terminal there are
keys: h shows the next hint, a grades the whole task, q quits; Ctrl-C also ends a grading. Each verdict begins on an
empty screen, and has no more lines than fit on it. Without a terminal, all lines are printed, one below the other.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, cache_dir
from course.next_step import next_region, open_regions, written
from course.table import Course, load_course
from grader import ranks
from grader.messages import Printed, messages
from grader.plugin import ENTRIES, WRITTEN, grade_here, next_hint
from grader.ranks.running import STARTER
from grader.report import Entry

KEYS = "h: next hint   a: whole task   q: quit"
CLEAR = "\x1b[2J\x1b[H"  # the screen, not what one can scroll back to
LOOK = 0.2  # seconds between two looks at the keyboard and the files
SAVING = 0.05  # seconds after which a file that is being saved has changed again


class OneGrading:
    """A plugin of one pytest run: keeps its verdicts."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.printed: Printed = {}
        self.warnings: list[str] = []  # of copies of earlier regions

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        self.entries = [*config.stash.get(ENTRIES, {}).values()]
        if WRITTEN in config.stash:
            self.printed, self.warnings = config.stash[WRITTEN].printed, config.stash[WRITTEN].warnings

    @property
    def failed(self) -> list[str]:
        """Return the regions that have not passed, in the order of the course."""
        return [*dict.fromkeys(entry.region for entry in self.entries if entry.status != "passed")]

    @property
    def points(self) -> str:
        """Return `5/6 points`."""
        return f"{sum(one.points for one in self.entries)}/{sum(one.max_points for one in self.entries)} points"


class Watch:
    """The region that is watched, and what was written when it was last graded."""

    def __init__(self, course: Course, tree: Path, region: str) -> None:
        self.course, self.tree, self.region = course, tree, region
        self.complete: set[str] = set()  # tasks that have passed as a whole
        self.graded = written(course, tree)
        self.stamps = self.stamps_now()

    def stamps_now(self) -> dict[Path, tuple[int, int]]:
        """Return the time and the size of every Python file in the folders of the course's regions."""
        stamps = {}
        for folder in {self.tree / row.file.partition("/")[0] for row in self.course.regions.values()}:
            for file in folder.rglob("*.py"):
                with contextlib.suppress(OSError):  # an editor may take it away for a moment
                    stat = file.stat()
                    stamps[file] = (stat.st_mtime_ns, stat.st_size)
        return stamps

    def look(self) -> None:
        """Grade if a file was saved since the last look; an editor may take some moments to save it."""
        if self.stamps == (now := self.stamps_now()):
            return
        while self.stamps != now:
            self.stamps = now
            time.sleep(SAVING)
            now = self.stamps_now()
        self.saved()

    def grade(self, *selection: str) -> OneGrading:
        """Run graders in this process; return their verdicts."""
        run = OneGrading()
        code = grade_here(self.tree, run, *selection)
        if code == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt  # pytest has taken Ctrl-C for itself
        return run

    def grade_region(self) -> None:
        """Grade the watched region. When it passes, watch the next open one, of its task if possible.

        When it was the last open one of its task, grade the whole task once. If all of it passes, `grade_task` goes on;
        otherwise watch the first region that does not pass.
        """
        row = self.course.regions[self.region]
        show([f"grading {self.region} {row.title} ..."])
        run = self.grade("--region", self.region)
        show(self.lines_of(run, f"{self.region} {row.title}"))
        if not run.entries or run.failed:
            return
        of_task = {id for id, other in self.course.regions.items() if other.task == row.task}
        if of_task & open_regions(self.course, self.tree).keys() or row.task in self.complete:
            self.move_on(next_region(self.course, self.tree, of_task))
        elif failed := self.grade_task(row.task):
            self.move_on(failed[0])

    def lines_of(self, run: OneGrading, what: str) -> list[str]:
        """Return what a student reads of a grading: the causes, what is not written yet, or that all has passed."""
        if not run.entries:
            return [f"{what}: no test was run"]
        still_open = open_regions(self.course, self.tree)
        lines = messages(run.entries, self.course, run.printed, names=False)
        for region in dict.fromkeys(entry.region for entry in run.entries if entry.status == "not attempted"):
            row = self.course.regions[region]
            place = f"{row.file}:{still_open[region]}" if region in still_open else row.file
            lines.append(f"{region} {row.title} is not written yet: {place}, steps in {self.course.readme(region)}")
        lines += [f"warning: {words}" for words in run.warnings]
        return lines if run.failed else [f"{what} passes: {run.points}", *lines]

    def move_on(self, region: str) -> None:
        if region and region != self.region:
            self.region = region
            print(f"now watching {region} {self.course.regions[region].title}", flush=True)

    def saved(self) -> None:
        """Grade the region whose lines have changed; if none have, the watched one."""
        now = written(self.course, self.tree)
        changed = [id for id in now if now[id] != self.graded.get(id)]
        self.graded |= now
        if changed and self.region not in changed:
            self.region = changed[0]
        self.grade_region()

    def grade_task(self, task: str) -> list[str]:
        """Grade all regions of a task; return those that do not pass, in the order of the course."""
        show([f"grading the whole task {task} ..."])
        run = self.grade("-m", self.course.tasks[task].marker)
        failed = [region for region in self.course.in_order_of_needs() if region in run.failed]
        show(self.lines_of(run, f"task {task}"))
        if run.entries and not failed:
            self.complete.add(task)
            print(f"task {task} is complete", flush=True)
            self.move_on(next_region(self.course, self.tree))
        return failed

    def begin(self, task: str) -> None:
        """Grade the first region to watch; of a task that is all written, the first one that does not pass."""
        is_open = self.region in open_regions(self.course, self.tree)
        if not task or (is_open and self.course.regions[self.region].task == task):
            return self.grade_region()
        if failed := self.grade_task(task):
            self.move_on(failed[0])

    def press(self, key: str) -> None:
        """Do what a key asks for."""
        if key == "h":
            hint = next_hint(self.course, self.region, cache_dir("hints") / "shown.json")
            print("\n".join(fit(hint.splitlines())), flush=True)
        elif key == "a":
            self.grade_task(self.course.regions[self.region].task)

    def run(self, task: str = "") -> None:
        """Watch until q, Ctrl-C or the end of the terminal. task: the one to begin with."""
        with keys() as pressed:
            self.begin(task)
            if not sys.stdin.isatty():
                print("watching; press Ctrl-C to stop", flush=True)
            while (key := pressed()) != "q":
                self.press(key)
                self.look()


def fit(lines: Sequence[str]) -> list[str]:
    """Wrap lines for the terminal, and keep the first ones that fit on it."""
    if not sys.stdout.isatty():
        return list(lines)
    columns, rows = shutil.get_terminal_size()
    folded: list[str] = []
    for line in lines:
        margin = " " * (len(line) - len(line.lstrip()))
        folded += textwrap.wrap(line, columns, subsequent_indent=margin, break_on_hyphens=False) or [""]
    most = rows - 4  # the keys, where to continue, and the cursor
    return folded if len(folded) <= most else [*folded[: most - 1], f"... {len(folded) - most + 1} more lines"]


def show(lines: Sequence[str]) -> None:
    """Print lines. A terminal is cleared first, and the keys are below the lines."""
    if sys.stdout.isatty():
        print(CLEAR + "\n".join([*fit(lines), KEYS]), flush=True)
    else:
        print("\n".join(lines), flush=True)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[], str]]:
    """Give a function that waits a moment and returns the key that was pressed, or "". Afterwards the terminal is as
    before."""
    fd = sys.stdin.fileno()
    readable = [fd] if os.isatty(fd) else []

    def pressed() -> str:
        return os.read(fd, 1).decode(errors="replace") if select.select(readable, [], [], LOOK)[0] else ""

    if not readable:
        yield pressed
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def first_region(course: Course, tree: Path, wanted: str) -> tuple[str, str]:
    """Return the region to begin with, and the task that was asked for, "" if none was.

    Raises:
        InputError: the name is neither a region's nor a task's.
    """
    if wanted in course.regions:
        return wanted, ""
    tasks = [task for task in course.tasks.values() if wanted in (task.id, task.marker, task.folder)]
    if wanted and not tasks:
        region = next(iter(course.regions))
        example = f"such as {region} or {course.tasks[course.regions[region].task].marker}"
        raise InputError(f"expected a region or a task, {example}; got {wanted!r}")
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
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    STARTER.lasts = True
    ranks.start()
    try:
        Watch(course, tree, region).run(task)
    except BaseException:  # what pytest makes of an interrupt depends on where it comes
        if not interrupted:
            raise
        print()
    finally:
        ranks.stop()


if __name__ == "__main__":
    exit_on_input_error(main)
