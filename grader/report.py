"""What a pytest run of the graders came to: one report.json, and its rendering as a table of points at the end."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from common.course import Course
from common.paths import atomic_write


@dataclass
class Entry:
    """One graded test; `message` is what the student reads, "" if it passed."""

    id: str
    task: str
    region: str
    status: str
    points: int
    max_points: int
    message: str


def as_dict(entries: Iterable[Entry]) -> dict:
    """The content of report.json."""
    entries = list(entries)
    return {
        "tests": [asdict(entry) for entry in entries],
        "score": sum(entry.points for entry in entries),
        "max_score": sum(entry.max_points for entry in entries),
    }


def write(path: str | Path, entries: Iterable[Entry]) -> None:
    """Write report.json; nobody ever sees half of it."""
    with atomic_write(path) as file:
        json.dump(as_dict(entries), file, indent=1, ensure_ascii=False)


def render(entries: list[Entry], course: Course) -> list[str]:
    """A table: a line for each region that was graded, a sum for each task."""
    lines = []
    for task in course.tasks.values():
        of_task = [entry for entry in entries if entry.task == task.id]
        if not of_task:
            continue
        lines.append(f"{'task ' + task.id:10} {task.title:48} {_points(of_task):>8}")
        for region in dict.fromkeys(entry.region for entry in of_task):
            of_region = [entry for entry in of_task if entry.region == region]
            failed = dict.fromkeys(entry.status for entry in of_region if entry.status != "passed")
            lines.append(
                f"  {region:8} {course.regions[region].title:48} {_points(of_region):>8}  {', '.join(failed)}".rstrip()
            )
    if len(lines) > 1:
        lines.append(f"{'total':10} {'':48} {_points(entries):>8}")
    return lines


def _points(entries: list[Entry]) -> str:
    return f"{sum(entry.points for entry in entries)}/{sum(entry.max_points for entry in entries)}"
