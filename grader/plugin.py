"""The graders as pytest shows them: options, markers, points, outcomes, hints, and the table at the end.

A test marked `graded(region)` belongs to a region of course.toml; all other tests are left alone, and those of a region
that the table does not have are left out. weights.py divides the region's points. With `absence=True` the test shows
only that something is not there (an import, a second collective). It counts when the region's other tests pass: code
that does nothing must not earn its points.
"""

import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import pytest

from common.errors import InputError
from common.paths import ROOT, atomic_write, cache_dir
from course.graded_tests import GradedTest
from course.manifest import read_manifest
from course.next_step import next_step
from course.table import STEPS_OF_A_HINT, Course, load_course
from grader import messages, ranks, report, tampering
from grader.grading import Grade, Session
from grader.ranks.running import STARTER
from grader.report import Entry
from grader.verdicts import (
    GRADER_FAILED,
    Crashed,
    NotAttempted,
    NotGradedHere,
    Skipped,
    TimedOut,
    Verdict,
    needs_a_network,
)  # fmt: skip
from grader.weights import Weights

SESSION = pytest.StashKey[Session]()
ENTRIES = pytest.StashKey[dict[str, Entry]]()  # of the tests that have run
WRITTEN = pytest.StashKey[report.Report]()  # report.json, which has those to come, too
WEIGHTS = pytest.StashKey[Weights]()
COPIES = pytest.StashKey[dict[str, str]]()  # region -> what is wrong with copies of earlier regions in its script


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cos598d", "graders of the course")
    group.addoption("--hint", metavar="REGION", help="show the next hint for a region, and run nothing")
    group.addoption("--region", metavar="REGION", help="run the tests of this region only")
    group.addoption("--tree", metavar="DIR", help="grade the files in this folder (default: this repository)")
    group.addoption("--report", metavar="FILE", help="write points and messages as JSON")
    group.addoption(
        "--prints",
        choices=("first", "all"),
        default="first",
        help="whose output to show: rank 0's (first) or every rank's (all)",
    )
    group.addoption("--no-network", action="store_true", help="skip tests that need a network; they give no points")
    group.addoption(
        "--start-method",
        choices=("fork", "spawn"),
        default="",
        help="how ranks start; spawn takes longer (default: fork, where a process that has loaded torch can)",
    )
    group.addoption("--seed", metavar="N", type=int, help="seed of the inputs, to repeat an earlier run")


def pytest_configure(config: pytest.Config) -> None:
    """Make what all tests share: the session with the student's tree, the report, and the weights."""
    if not importlib.util.find_spec("torch"):
        raise pytest.UsageError(
            f"expected a Python with torch, got {sys.executable}; run `source .venv/bin/activate` first"
        )
    config.addinivalue_line(
        "markers",
        "graded(region, weight=1, needs=[], absence=False, network=False): a test that gives points for a region",
    )
    if config.getoption("verbose", None) == 0:  # grader.debug has no terminal plugin, and so no such option
        config.option.verbose = -1  # like -q, so that pytest's header and lists of files do not come before the cause
    tree = Path(config.getoption("--tree") or os.environ.get("COS598D_TREE") or ROOT).resolve()
    try:
        course = load_course()
        read_manifest(ROOT)  # a damaged manifest is said here, once, and not in every test
        config.stash[SESSION] = Session(tree, course, config.getoption("--seed"))
    except InputError as error:
        raise pytest.UsageError(str(error)) from None
    STARTER.start_method = config.getoption("--start-method")
    config.stash[ENTRIES], config.stash[COPIES] = {}, {}
    path = config.getoption("--report") or os.environ.get("COS598D_REPORT") or ""
    config.stash[WRITTEN] = report.Report(path, course.bonus_regions)
    config.stash[WEIGHTS] = Weights(config.rootpath, course)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    region = config.getoption("--hint")
    if not region:
        return None
    try:
        print(next_hint(load_course(), region, cache_dir("hints") / "shown.json"))
    except InputError as error:
        print(f"error: {error}")
        return 2
    return 0


def next_hint(course: Course, region: str, kept: Path) -> str:
    """Return the next of a region's three hints; a file keeps how many were shown. After the last: all three."""
    if region not in course.regions:
        raise InputError(f"--hint: expected a region, one of {', '.join(course.regions)}; got {region!r}")
    try:
        shown = dict(json.loads(kept.read_text()))
    except (OSError, ValueError):
        shown = {}
    row, number = course.regions[region], int(shown.get(region, 0)) + 1
    title = f"{region} {row.title} ({row.file}, {course.readme(region)})"
    if number > STEPS_OF_A_HINT:
        hints = "\n".join(f"hint {i}: {hint}" for i, hint in enumerate(row.hints, 1))
        return f"{title}\nthese are all {STEPS_OF_A_HINT} hints:\n{hints}"
    with atomic_write(kept) as file:
        json.dump(shown | {region: number}, file)
    return f"{title}\nhint {number} of {STEPS_OF_A_HINT}: {row.hints[number - 1]}"


def mark_of(item: pytest.Item) -> GradedTest:
    """Return the mark of a graded test; of any other test, one without a region."""
    mark = item.get_closest_marker("graded")
    return GradedTest(*mark.args, **mark.kwargs) if mark else GradedTest("")


def not_graded_here(item: pytest.Item) -> NotGradedHere | None:
    """Return the verdict of a test that needs a network if this machine has none of its own to give to its ranks."""
    return needs_a_network() if mark_of(item).network and item.config.getoption("--no-network") else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start to load torch while pytest collects: with --region, ranks will be needed."""
    wanted, regions = session.config.getoption("--region"), session.config.stash[SESSION].course.regions
    if wanted and wanted not in regions:
        raise pytest.UsageError(f"--region: expected a region, one of {', '.join(regions)}; got {wanted!r}")
    if wanted and not session.config.option.collectonly:
        ranks.start()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Open only the files with tests of --region, or of the course's marker after -m: to import all takes longer than
    many a region does. --region leaves out the tests that run whole scripts."""
    course, region = config.stash[SESSION].course, config.getoption("--region")
    asked, files = {region, config.getoption("-m")}, set[str]()
    for row in course.regions.values():
        task = course.tasks[row.task]
        if asked & {row.id, row.marker, task.marker}:
            files.update(row.tests, () if region else task.whole)
    if not files or collection_path.suffix != ".py" or not collection_path.is_relative_to(ROOT):
        return None
    return collection_path.relative_to(ROOT).as_posix() not in files or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with the markers of its region's row in course.toml, by which -m and -k select."""
    course = item.config.stash[SESSION].course
    if row := course.regions.get(mark_of(item).region):
        for name in dict.fromkeys((course.tasks[row.task].marker, row.marker)):
            item.add_marker(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of --region, and sort them: a region comes after those that it builds on, and tests of absence
    are the last of their region. So what a test builds on is judged before it runs."""
    wanted, regions = config.getoption("--region"), config.stash[SESSION].course.regions
    kept = [
        item
        for item in items
        if mark_of(item).region == wanted or (not wanted and mark_of(item).region in ("", *regions))
    ]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    order = {id: number for number, id in enumerate(config.stash[SESSION].course.in_order_of_needs())}
    items.sort(key=lambda item: (order.get(mark_of(item).region, -1), mark_of(item).absence))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note all tests to come with their points, and start to load torch in the process that starts the ranks."""
    graded_items = [(item, mark) for item in session.items if (mark := mark_of(item)).region]
    course, weights = session.config.stash[SESSION].course, session.config.stash[WEIGHTS]
    to_come = []
    for item, mark in graded_items:
        entry = Entry(item.nodeid, course.regions[mark.region].task, mark.region, report.PENDING)
        entry.take(not_graded_here(item) or TimedOut(report.NOT_REACHED))
        to_come.append(entry)
    weights.take(course, {item.nodeid: mark for item, mark in graded_items})
    weights.set_points(course, to_come)
    session.config.stash[WRITTEN].expect(to_come)
    if session.items and all(mark_of(item).region or item.get_closest_marker("carried") for item in session.items):
        _leave_out_pytests_list(session.config)
    if graded_items and not session.config.option.collectonly:
        ranks.start()
        tree = session.config.stash[SESSION].tree
        files = changeable(tree, course)
        session.config.stash[WRITTEN].flags = tampering.look_at(tree, files, ROOT)[: report.MAX_FLAGS]


def _leave_out_pytests_list(config: pytest.Config) -> None:
    """Leave out pytest's own list of failures if all tests are graded: messages.py lists them by region."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and config.option.tbstyle == "auto":
        config.option.tbstyle = "no"
    if terminal and config.option.reportchars == "fE":  # what pytest takes where nobody asks
        terminal.reportchars = ""


def changeable(tree: Path, course: Course) -> list[str]:
    """Return the files of a tree that are the student's to change, Python or not."""
    folders = {pattern.partition("/")[0] for pattern in course.may_change if "/" in pattern}
    files = (path for folder in sorted(folders) for path in sorted((tree / folder).rglob("*")) if path.is_file())
    names = [path.relative_to(tree).as_posix() for path in files]
    return [name for name in names if course.may_student_change(name)]


@pytest.fixture
def grade(request: pytest.FixtureRequest) -> Grade:
    """Return the tools of this graded test: its region, the student's file, and runs in ranks."""
    region = mark_of(request.node).region
    assert region, "a test that uses `grade` is marked graded(region)"
    return Grade(request.config.stash[SESSION], region, request.node.name, getattr(request.module, "CRASHES", None))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a graded test only if its region is written and it can be graded here."""
    grade = pyfuncitem.funcargs.get("grade")
    if not isinstance(grade, Grade):
        return (yield)
    grade.check_attempted()
    if verdict := not_graded_here(pyfuncitem):
        raise verdict
    with np.errstate(all="ignore"), warnings.catch_warnings():  # a student's numbers may overflow in arithmetic.py
        warnings.simplefilter("ignore", RuntimeWarning)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge a graded test that has run, and let pytest show this verdict."""
    result = yield
    region = mark_of(item).region
    if region and (call.when == "call" or not result.passed):
        result.longrepr = _judge(item, region, call) or result.longrepr
        grade = item.funcargs.get("grade") if isinstance(item, pytest.Function) else None
        ran = grade.last if isinstance(grade, Grade) else None
        item.config.stash[WRITTEN].add(item.config.stash[ENTRIES][item.nodeid], ran)
        if item.config.stash[ENTRIES][item.nodeid].status in (Skipped.status, NotGradedHere.status):
            result.outcome, result.longrepr = "skipped", (str(item.path), item.location[1] or 0, str(result.longrepr))
    return result


def _judge(item: pytest.Item, region: str, call: pytest.CallInfo) -> str:
    """Note the entry of a test that has run. Return what pytest shows instead of a traceback; "" to show it."""
    course, entries = item.config.stash[SESSION].course, item.config.stash[ENTRIES]
    error = call.excinfo.value if call.excinfo else None
    entry = item.config.stash[WRITTEN].entries[item.nodeid]
    entry.take(_verdict(item, region, error))
    entries[item.nodeid] = entry
    item.config.stash[WEIGHTS].set_points(course, item.config.stash[WRITTEN].entries.values())
    is_known = isinstance(error, Verdict) or entry.status == Skipped.status
    return f"{entry.status}: {entry.message} [region {region}, 0 of {entry.max_points}]" if is_known else ""


def _verdict(item: pytest.Item, region: str, error: BaseException | None) -> Verdict | None:
    """Return the verdict of a test that has ended with this error; None if it has passed."""
    course, entries = item.config.stash[SESSION].course, item.config.stash[ENTRIES]
    if error is not None:
        words = f"internal grader error (please report it): {type(error).__name__}: {error}"
        verdict = error if isinstance(error, Verdict) else Crashed(words, kind=GRADER_FAILED)
        if isinstance(verdict, NotAttempted | Skipped | NotGradedHere):
            return verdict
        missing = unpassed(course, region, mark_of(item).needs, entries)
        return (
            Skipped(verdict.cause, verdict.observed, verdict.kind, verdict.seed, first=missing) if missing else verdict
        )
    if mark_of(item).absence and (others := open_tests(region, entries)):
        return Skipped(not_counted(region, others), first=region)
    if course.carried == "points" and (broken := item.config.stash[COPIES].get(region)):
        return Skipped(f"not counted: {broken}")
    return None


def open_tests(region: str, entries: dict[str, Entry]) -> list[str]:
    """Return the names of a region's tests that have run and have not passed."""
    return [
        entry.id.rpartition("::")[2]
        for entry in entries.values()
        if entry.region == region and entry.status not in ("passed", NotGradedHere.status)
    ]


def not_counted(region: str, others: list[str]) -> str:
    rest = f" and {len(others) - 1} more have not passed" if len(others) > 1 else " has not passed"
    return f"not counted yet: this test counts only when the other tests of region {region} pass; {others[0]}{rest}"


def unpassed(course: Course, region: str, more: Sequence[str], entries: dict[str, Entry]) -> str:
    """Return a region that this one, or one of `more`, builds on and that has a failed test; "" if there is none."""
    failed = {entry.region for entry in entries.values() if entry.status not in ("passed", NotGradedHere.status)}
    return next((need for need in course.all_needs(region, *more) if need in failed - {region}), "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print messages, the table of points, and what to do next."""
    entries = list(config.stash[ENTRIES].values())
    if not entries:
        return
    course, tree = config.stash[SESSION].course, config.stash[SESSION].tree
    printed, all_ranks = config.stash[WRITTEN].printed, config.getoption("--prints") == "all"
    lines = messages.messages(entries, course, printed, all_ranks)
    for line in [*lines, "", *report.render(entries, course)]:
        terminalreporter.line(line)
    for region, points in report.points_elsewhere(entries, course).items():
        files = " ".join(course.tasks[course.regions[region].task].whole)
        if files and config.getoption("--region"):  # with -k nobody asked for all of them
            command = f"run `python -m pytest {files}`"
            noun = "point" if points == 1 else "points"
            terminalreporter.line(f"{region} has {points} more {noun}, for the whole script: {command}")
    open_ones = ("passed", "not attempted", Skipped.status, NotGradedHere.status)
    tried = {entry.region for entry in entries if entry.status not in open_ones}
    asked = {entry.region for entry in entries if entry.status == "not attempted"} if len(tried) == 0 else set()
    failed = [id for id in course.in_order_of_needs() if id in tried]
    tasks = {entry.task for entry in entries}  # a student who works on a task stays in it
    beside = {id for id, row in course.regions.items() if row.task in tasks}
    if step := next_step(course, tree, failed, asked or beside):
        terminalreporter.line(step)


def grade_here(tree: Path, plugin: object, *words: str) -> int:
    """Run graders in this process without a word; `plugin` takes the verdicts. Return pytest's exit code."""
    silent = ["-p", "no:terminal", "-p", "no:cacheprovider"]
    silent += ["-W", "ignore:Module already imported:pytest.PytestWarning"]
    course = [f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests"), f"--tree={tree}"]
    return pytest.main([*silent, *course, *words], [plugin])


def pytest_unconfigure() -> None:
    if not STARTER.lasts:
        ranks.stop()
