"""Tests of the copies of earlier regions in a later script. A region is graded in its home file.

@pytest.mark.carried("later/script.py", "x.1")
def test_the_copies_in_the_later_script_work(copies):
    copies(check_script)

Such a test never fails: copies that do not work give a warning. With `carried = "points"` in course.toml, a region of
that script counts only when its copies work; with "warning", the default, no point depends on it. Copies that equal
the original lines are not run: what is wrong with them is said of the original.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from course.table import Course
from course.todo import Block
from grader.grading import Grade
from grader.plugin import COPIES, SESSION, WRITTEN
from grader.session import blocks_of
from grader.verdicts import Verdict


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "carried(script, region): a test of the copies of earlier regions in a script")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the test with its task's marker, by which -m selects; what a course leaves out is not graded."""
    course = item.config.stash[SESSION].course
    if (mark := item.get_closest_marker("carried")) and (row := course.regions.get(mark.args[1])):
        item.add_marker(course.tasks[row.task].marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the copies in scripts that the course leaves out."""
    regions = config.stash[SESSION].course.regions
    marks = [(item, item.get_closest_marker("carried")) for item in items]
    if left_out := [item for item, mark in marks if mark and mark.args[1] not in regions]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def copies(request: pytest.FixtureRequest) -> Callable[[Callable[[Grade], None]], None]:
    """Return a function that checks the script of this test's mark, and keeps a failure as a warning."""
    script, region = request.node.get_closest_marker("carried").args
    session = request.config.stash[SESSION]
    grade = Grade(session, region, request.node.name, getattr(request.module, "CRASHES", None))
    grade.file = script

    def run(check: Callable[[Grade], None]) -> None:
        if words := warning(session.course, session.tree, script, lambda: check(grade)):
            request.config.stash[COPIES][region] = words
            request.config.stash[WRITTEN].warn(words)
            pytest.skip(f"warning: {words}")

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for words in config.stash[WRITTEN].warnings:
        terminalreporter.line(f"warning: {words}")


def warning(course: Course, tree: Path, script: str, check: Callable[[], None]) -> str:
    """Say what is wrong with the copies in a script; "" if they work, equal the original lines, or if their home files
    are not solved yet."""
    copies = [(block, home) for block in blocks_of(tree, script) if (home := _home(course, tree, script, block))]
    different = [(block, home) for block, home in copies if block.body.strip("\n") != home.body.strip("\n")]
    if not different or not all(home.attempted for _, home in copies):
        return ""
    files = {block.id: course.regions[block.id].file for block, _ in different}
    for block, home in different:
        if not block.attempted:
            return (
                f"{script}:{block.line}: region {block.id} is not written here, but it is in {files[block.id]}:"
                f"{home.line}: run `python submit.py carry`"
            )
    try:
        check()
    except Verdict as verdict:
        if verdict.status in ("not attempted", "skipped"):
            return ""
        cause = verdict.cause or verdict.observed.partition("\n")[0]
        places = ", ".join(
            f"{block.id} (line {block.line}; {files[block.id]}:{home.line})" for block, home in different
        )
        return (
            f"{script}:{different[0][0].line}: {cause}; these of your lines differ from the original ones: {places}; "
            "compare them, or run `python submit.py carry --force`"
        )
    return ""


def _home(course: Course, tree: Path, script: str, block: Block) -> Block | None:
    """Return the block that this one is a copy of; None if its home is here."""
    row = course.regions.get(block.id)
    if row is None or row.file == script:
        return None
    return next((one for one in blocks_of(tree, row.file) if (one.id, one.part) == (block.id, block.part)), None)
