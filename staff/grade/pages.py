"""The pages that people read: one for each submission, one for the class. Plain HTML, no scripts, nothing from outside.

What students wrote and printed stands in them, so everything is escaped, and the pages forbid scripts themselves.
"""

import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from course.rows import RegionRow
from course.table import Course, score_in_words
from grader import messages
from grader.report import Entry, entries_of
from staff.grade import gradebook
from staff.grade.gradebook import GradedHandIn
from staff.grade.measurements import find_shared
from staff.grade.texts import printable

TEMPLATES = Path(__file__).parent / "templates"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class FailedTests:
    """Tests of a region that failed for one reason: the first of them, the sentences of the others, and what the ranks
    printed in the first that has something of them."""

    test: Entry
    same: tuple[str, ...]
    max_points: int
    output: list[dict[str, str]]

    @property
    def sentence(self) -> str:
        return sentence(self.test.id)

    @property
    def line(self) -> str:
        return messages.in_a_line(self.test)


def sentence(test: str) -> str:
    """What a test says, from its name."""
    return test.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def ranks_alike(output: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Ranks that printed the same and ended alike are shown once."""
    alike: dict[tuple, list[int]] = {}
    for rank in output:
        alike.setdefault((rank["ended"], rank["stdout"], rank["stderr"]), []).append(rank["rank"])
    if not any(stdout or stderr for _, stdout, stderr in alike):
        return []
    return [
        {"ranks": _numbers(ranks), "ended": ended, "stdout": as_shown(stdout), "stderr": as_shown(stderr)}
        for (ended, stdout, stderr), ranks in alike.items()
    ]


def as_shown(printed: str) -> str:
    """What a terminal would show in the end: of a progress bar, which goes back to the line's start, the last state."""
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in ESCAPES.sub("", printed).split("\n"))
    return printable("\n".join(filter(None, lines)))


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def student_page(row: GradedHandIn, course: Course) -> str:
    """The page of one submission."""
    tasks = [task for id in course.tasks if (task := _task(row, course, id))["regions"]]
    failed = {test["region"] for test in row.tests if test["status"] not in gradebook.NOT_MISTAKES}
    first = "" if row.run["unreadable"] else next((id for id in course.in_order_of_needs() if id in failed), "")
    look_at = next((region for task in tasks for region in task["regions"] if region["id"] == first), None)
    return _template("student.html").render(
        score=score_in_words(row.report),
        report=row.report,
        run=row.run,
        tasks=tasks,
        first=look_at,
        seed=messages.seed_line(entries(row)),
    )


def _task(row: GradedHandIn, course: Course, id: str) -> dict[str, Any]:
    regions = [_region(row, course, region) for region in course.regions.values() if region.task == id]
    regions = [region for region in regions if region["tests"]]
    return {"id": id, "title": course.tasks[id].title, "regions": regions} | _sums(regions)


def _region(row: GradedHandIn, course: Course, region: RegionRow) -> dict[str, Any]:
    tests = [test for test in entries(row) if test.region == region.id]
    about = {"id": region.id, "title": region.title, "file": region.file, "readme": course.readme(region.id)}
    return about | {
        "hint": region.hints[0],
        "tests": tests,
        "failures": failures(tests, row.run.get("output", {})),
        "follow": [sentence(test.id) for test in tests if test.follows],
        "open": [sentence(test.id) for test in tests if test.status == "not attempted"],
        "passed": [(sentence(test.id), test.points) for test in tests if test.status == "passed"],
        "points": sum(test.points for test in tests),
        "max_points": sum(test.max_points for test in tests),
    }


def failures(tests: Sequence[Entry], output: Mapping[str, list[dict[str, Any]]]) -> list[FailedTests]:
    """The failed tests of one region as in the terminal: by reason, the most telling reason first."""
    all_failures = []
    for group in messages.by_kind(filter(messages.tells, tests)):
        printed = next(filter(None, (ranks_alike(output.get(test.id, [])) for test in group)), [])
        points = sum(test.max_points for test in group)
        same = tuple(sentence(test.id) for test in group[1:])
        all_failures.append(FailedTests(group[0], same, points, printed))
    return all_failures


def entries(row: GradedHandIn) -> list[Entry]:
    """The graded tests of a submission."""
    return entries_of(row.tests)


def _sums(parts: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {key: sum(part[key] for part in parts) for key in ("points", "max_points")}


def class_page(rows: Sequence[GradedHandIn], course: Course, footer: str, missing: Sequence[str] = ()) -> str:
    """The overview of a class: scores, regions, common mistakes, submissions; `missing` are not graded yet."""
    scores = [row.report["score"] for row in rows]
    bins = gradebook.histogram(rows)
    readable = [row for row in rows if not row.run["unreadable"]]
    mistakes = [vars(mistake) | {"sentence": sentence(mistake.test)} for mistake in gradebook.mistakes(readable)]
    return _template("class.html").render(
        in_words=score_in_words,
        rows=rows,
        missing=missing,
        equal=gradebook.equal(rows),
        shared=find_shared({row.name: row.run.get("measured", ()) for row in rows}),
        flagged=[row for row in rows if row.run.get("flags")],
        readable=len(readable),
        unreadable=len(rows) - len(readable),
        mean=round(statistics.mean(scores), 1),
        median=round(statistics.median(scores), 1),
        most=max(row.report["max_score"] for row in rows),
        histogram=bins,
        highest=max(count for _, count in bins),
        regions=gradebook.regions(readable, course),
        mistakes=mistakes,
        tasks=list(course.tasks),
        footer=footer,
    )


@functools.cache
def _template(name: str) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)
