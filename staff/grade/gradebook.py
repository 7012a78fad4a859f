"""The class in figures: the grade book as a table, how each region went, and the mistakes that occur most often."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.paths import atomic_write
from course.table import NOT_GRADED_HERE, Course
from grader import report
from grader.report import Entry
from staff.grade.texts import safe_cell

MOST_MISTAKES = 20
NOT_MISTAKES = ("passed", "not attempted", "skipped", NOT_GRADED_HERE)


@dataclass(frozen=True)
class GradedHandIn:
    """One submission: its report.json, and what was noted about it while it was graded (run.json)."""

    report: dict[str, Any]
    run: dict[str, Any]

    @property
    def name(self) -> str:
        return self.report["submission"]

    @property
    def tests(self) -> list[dict[str, Any]]:
        return self.report["tests"]

    @property
    def of_report(self) -> list[float | str]:
        """Points of the report and the most there are; blank until somebody has entered them (staff/rubric.py)."""
        points = self.run.get("report_points")
        return [*points] if points else ["", ""]

    def points(self, key: str, value: str) -> int:
        """Points of a task or a region."""
        return sum(test["points"] for test in self.tests if test[key] == value)


@dataclass(frozen=True)
class RegionFigures:
    """How a class did in one region: how many submissions have all its points, some of them, none, or did not try."""

    id: str
    title: str
    max_points: int
    mean: float
    full: int
    some: int
    none: int
    untried: int

    @property
    def submissions(self) -> int:
        return self.full + self.some + self.none + self.untried


@dataclass(frozen=True)
class Mistake:
    """One mistake and who made it, in the words of the first: the numbers in them differ."""

    test: str
    region: str
    message: str
    names: tuple[str, ...]


def write_csv(path: Path, rows: Iterable[GradedHandIn], course: Course) -> None:
    """One line for each submission: score, bonus, points of each task and region, time, memory, notes."""
    head = ["submission", "score", "max_score", "bonus", "max_bonus", "report", "max_report"]
    head += [f"task {task}" for task in course.tasks] + list(course.regions)
    head += ["not graded here", "needs manual review", "seconds", "peak_pss_mb", "notes"]
    write_table(path, head, [cells_of(row, course) for row in rows])


def write_table(path: Path, head: Sequence[str], lines: Iterable[Sequence[str | int | float]]) -> None:
    """Write a file of comma-separated values; nobody ever sees half of it."""
    with atomic_write(path) as file:
        table = csv.writer(file)
        table.writerow(head)
        table.writerows(lines)


def cells_of(row: GradedHandIn, course: Course) -> list[str | int | float]:
    """The cells of one submission."""
    points = [row.points("task", task) for task in course.tasks]
    points += [row.points("region", region) for region in course.regions]
    figures = [
        row.report.get("not_graded_here", 0),
        safe_cell(look_at(row)),
        row.run.get("wall_s", ""),
        row.run.get("peak_pss_mb", ""),
    ]
    score = [row.report["score"], row.report["max_score"], row.report.get("bonus", 0), row.report.get("max_bonus", 0)]
    return [
        safe_cell(row.name),
        *score,
        *row.of_report,
        *points,
        *figures,
        safe_cell("; ".join(row.run.get("notes", []))),
    ]


def equal(rows: Iterable[GradedHandIn]) -> list[list[str]]:
    """Return the names of submissions that are the same, byte for byte, in what is graded of them."""
    by_digest: dict[str, list[str]] = {}
    for row in rows:
        if not row.run.get("unreadable"):
            by_digest.setdefault(str(row.run.get("hand_in", row.name)), []).append(row.name)
    return [names for names in by_digest.values() if len(names) > 1]


def look_at(row: GradedHandIn) -> str:
    """Return the lines that need manual review: "common/schedule.py:3, while running"."""
    return ", ".join(dict.fromkeys(map(place_of, row.run.get("flags", []))))


def place_of(flag: dict[str, Any]) -> str:
    """Return "common/schedule.py:3". Some flags belong to no line, and those of a run to no file."""
    place = flag["file"] or "while running"
    return f"{place}:{flag['line']}" if flag["line"] else place


def regions(rows: Sequence[GradedHandIn], course: Course) -> list[RegionFigures]:
    """Each region that gave points, in the order of course.toml."""
    shown = []
    for region in course.regions.values():
        all_tests = ([test for test in row.tests if test["region"] == region.id] for row in rows)
        graded = ([test for test in tests if test["status"] != NOT_GRADED_HERE] for tests in all_tests)
        by_submission = list(filter(None, graded))
        most = max((sum(test["max_points"] for test in tests) for tests in by_submission), default=0)
        if not most:  # such as where --tests names only tests whose part of the points is rounded to 0
            continue
        points = [sum(test["points"] for test in tests) for tests in by_submission]
        untried = sum(all(test["status"] == "not attempted" for test in tests) for tests in by_submission)
        full = sum(got == most for got in points)
        none = sum(got == 0 for got in points) - untried
        some = len(points) - full - none - untried
        shown.append(RegionFigures(region.id, region.title, most, statistics.mean(points), full, some, none, untried))
    return shown


def mistakes(rows: Iterable[GradedHandIn]) -> list[Mistake]:
    """Failed tests that found the same, the most frequent first."""
    by_kind: dict[tuple[str, str], list[tuple[str, Entry]]] = {}
    for row in rows:
        for test in report.entries_of(row.tests):
            if test.status not in NOT_MISTAKES:
                by_kind.setdefault((test.id, test.kind), []).append((row.name, test))
    ordered = sorted(by_kind.values(), key=lambda same: (-len(same), same[0][1].id))
    return [
        Mistake(same[0][1].id, same[0][1].region, same[0][1].text, tuple(name for name, _ in same))
        for same in ordered[:MOST_MISTAKES]
    ]


def histogram(rows: Sequence[GradedHandIn], bins: int = 10) -> list[tuple[str, int]]:
    """(range of the score in percent, how many); the last bin holds full marks too."""
    counts = [0] * bins
    for row in rows:
        share = row.report["score"] / max(1, row.report["max_score"])
        counts[min(bins - 1, int(share * bins))] += 1
    width = 100 // bins
    return [(f"{width * i}–{width * (i + 1)} %", count) for i, count in enumerate(counts)]
