"""The pytest side of grader/checks/copies.py: tests marked carried(script, region) never fail, they warn.

@pytest.mark.carried("task4_traffic/run_glue.py", "4.1")
def test_the_copies_in_task4_work(copies):
    copies(grader.checks.copies.check_glue)
"""

from collections.abc import Callable
from typing import Any

import pytest

from grader.checks.copies import warning
from grader.grading import Grade
from grader.plugin import COPIES, SESSION, WRITTEN


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "carried(script, region): a test of the copies of earlier regions in a script")


def pytest_itemcollected(item: pytest.Item) -> None:
    mark = item.get_closest_marker("carried")
    if mark:
        course = item.config.stash[SESSION].course
        item.add_marker(course.tasks[course.regions[mark.args[1]].task].marker)


@pytest.fixture
def copies(request: pytest.FixtureRequest) -> Callable[[Callable[[Grade], None]], None]:
    """Runs a check on the script of this test's mark, and keeps what it says as a warning."""
    script, region = request.node.get_closest_marker("carried").args
    session = request.config.stash[SESSION]
    grade = Grade(session, region, request.node.name)
    grade.file = script

    def run(check: Callable[[Grade], None]) -> None:
        if words := warning(session.course, session.tree, script, lambda: check(grade)):
            request.config.stash[COPIES][region] = words
            request.config.stash[WRITTEN].warn(words)
            pytest.skip(f"warning: {words}")

    return run


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for words in config.stash[COPIES].values():
        terminalreporter.line(f"warning: {words}")
