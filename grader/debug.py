"""Runs the graders of one region with pdb on one rank, in this terminal.

    python -m grader.debug REGION              # rank 0
    python -m grader.debug REGION --rank 1
    python -m grader.debug REGION --test mean  # a test with "mean" in its name

The debugger stops at your `breakpoint()`, or at the region's first line if the region has none. The other ranks run
normally and wait for yours where they need it; there is no time limit. The command ends after the first run
in which the debugger has stopped: q and Ctrl-C end it at once. Nothing is graded.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import ast
import contextlib
import os
import re
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from course.table import Course, load_course
from course.todo import find_blocks
from grader import ranks
from grader.inside.debugger import STOPPED
from grader.messages import name, of_region, prints
from grader.plugin import ENTRIES, SESSION, WRITTEN, grade_here
from grader.ranks.one_run import Debug
from grader.ranks.outcome import Result
from grader.ranks.running import STARTER
from grader.session import Session
from grader.wire.processes import path_of
from grader.wire.request import Request

# A socket that an interrupt has left open is no news to a student.
OPTIONS = ("-s", "-p", "no:unraisableexception")
NO_DEADLINE = 24 * 3600.0  # seconds; a wait of more than 24 days is refused by the system
OWN_STOP = re.compile(r"\bbreakpoint\(|\bset_trace\(")


class DebugSession(Session):
    """The runs of a region's graders: one rank of each is debugged, until the debugger has stopped in one of them."""

    def __init__(self, tree: Path, course: Course, seed: int, rank: int, debug: Debug) -> None:
        super().__init__(tree, course, seed)
        self.rank, self.debug = rank, debug
        self.slowness = 1.0
        self.stopped, self.quit = False, False
        self.sizes: set[int] = set()  # numbers of ranks that were asked for

    def result_of(self, request: Request, region: str = "") -> Result:
        """Run a function, with pdb on the chosen rank unless the debugger has stopped in an earlier run."""
        world_size = len(request.inputs)
        wanted = request.function is not None and not self.stopped and self.rank < world_size
        debug = self.debug if wanted else replace(self.debug, rank=None)
        result = STARTER.run(request.within(NO_DEADLINE), tree=self.tree, debug=debug)
        if request.function:
            self.sizes.add(world_size)
        if not wanted:
            return result
        debugged = result.ranks[self.rank]
        self.stopped = any(event.name == STOPPED for event in debugged.events)
        self.quit = bool(debugged.error and debugged.error.type == "BdbQuit")
        if self.quit:
            pytest.exit("quit", returncode=0)
        return result


class OneDebugging:
    """A plugin of the pytest run: replaces the session, and ends the run after the debugger stopped in a test."""

    def __init__(self, session: DebugSession) -> None:
        self.session = session
        self.lines: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[SESSION] = self.session

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not self.session.stopped:
            print(f"{item.name}: pdb on rank {self.session.rank}; c: continue, q: quit", flush=True)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.session.stopped:
            item.session.shouldstop = "the debugger has stopped once"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep the lines that say which tests passed and why the others did not; none after q."""
        entries = session.config.stash[ENTRIES].values()
        if not self.session.quit:
            self.lines = [f"{name(entry)}: passed" for entry in entries if entry.status == "passed"]
            self.lines += of_region(entry for entry in entries if entry.status != "passed")
            self.lines += prints([entry.id for entry in entries], session.config.stash[WRITTEN].printed, all_ranks=True)


def first_lines(tree: Path, file: str, region: str) -> list[tuple[str, int]]:
    """Return path and line of the first statement between TODO and END TODO, for each part of a region.

    An empty list if the region has a breakpoint() of the student.

    Raises:
        InputError: the file is missing or is no Python, or a TODO line and an END TODO line do not belong together.
    """
    try:
        text = (tree / file).read_text(encoding="utf-8")
        statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise InputError(f"{file}: expected a Python file, got {error}; fix it first") from None
    blocks = [block for block in find_blocks(text, file) if block.id == region]
    if any(OWN_STOP.search(block.body) for block in blocks):
        return []
    inside = [[node.lineno for node in statements if block.line < node.lineno < block.end_line] for block in blocks]
    return [(str(tree / file), min(lines)) for lines in inside if lines]


@contextlib.contextmanager
def terminal() -> Iterator[str]:
    """Give the path of this terminal, and restore its settings afterwards, which a killed rank could not do.

    Raises:
        InputError: stdin is no terminal.
    """
    if not sys.stdin.isatty():
        raise InputError("expected a terminal to debug in, got a file or a pipe as stdin; run this in a terminal")
    before = termios.tcgetattr(sys.stdin)
    try:
        path = os.ttyname(sys.stdin.fileno())
    except OSError:  # the terminal is one of another container
        path = path_of(sys.stdin.fileno())
    try:
        yield path
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grader.debug", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("region", help=f"such as {min(load_course().regions)}")
    parser.add_argument("--rank", type=int, default=0, help="the rank to debug (%(default)s)")
    parser.add_argument("--test", default="", metavar="TEXT", help="only tests with TEXT in their name")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (%(default)s)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the folder of your files (default: this repository)")
    options = parser.parse_args(argv)
    course, tree = load_course(), options.tree.resolve()
    if options.region not in course.regions:
        raise InputError(f"expected a region, one of {', '.join(course.regions)}; got {options.region!r}")
    if not 0 <= options.rank < ranks.running.MAX_RANKS:
        raise InputError(f"--rank: expected 0 to {ranks.running.MAX_RANKS - 1}, got {options.rank}")
    stops = first_lines(tree, course.regions[options.region].file, options.region)
    chosen = ["--region", options.region, *(["-k", options.test] if options.test else [])]
    with terminal() as path:
        session = DebugSession(tree, course, options.seed, options.rank, Debug(options.rank, path, stops))
        run = OneDebugging(session)
        code = grade_here(tree, run, *OPTIONS, *chosen)
    for line in run.lines:
        print(line)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise InputError(f"--test: no test of region {options.region} has {options.test!r} in its name")
    if not (session.stopped or session.quit or code == pytest.ExitCode.INTERRUPTED):
        sizes = " and ".join(map(str, sorted(session.sizes))) or "no"
        raise InputError(
            f"rank {options.rank} has not reached region {options.region} (the tests ran with {sizes} ranks); "
            "put breakpoint() where you want to stop, or choose another --rank"
        )


if __name__ == "__main__":
    exit_on_input_error(main)
