"""What the first lines of course.toml choose among its rows, the points that follow, and what contradicts itself."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from course.rows import CARRIED, Course


def choose(course: Course, chosen: Collection[str]) -> Course:
    """The course with the tasks and lessons that it is to have, and their points."""
    kept = {
        row.id: replace(row, bonus=row.bonus and row.id not in course.graded)
        for row in course.regions.values()
        if row.id in course.graded or (course.bonus > 0 if row.bonus else row.task in chosen)
    }

    solved = set[str]()  # what is not chosen, but needed

    def needs(id: str) -> list[str]:
        """What a region builds on; in place of one that is not chosen, what that one builds on."""
        solved.update(need for need in course.regions[id].needs if need not in kept)
        nearest = [[need] if need in kept else needs(need) for need in course.regions[id].needs]
        return list(dict.fromkeys(itertools.chain.from_iterable(nearest)))

    kept = {id: replace(row, needs=tuple(needs(id))) for id, row in kept.items()}
    required = {id: row.points for id, row in kept.items() if not row.bonus}
    extra = {id: row.points for id, row in kept.items() if row.bonus}
    points = scaled(required, course.total) | scaled(extra, min(course.bonus, sum(extra.values())))
    tasks = {id: task for id, task in course.tasks.items() if id in {row.task for row in kept.values()}}
    folders = {task.folder for task in course.tasks.values()} - {task.folder for task in tasks.values()}
    return replace(
        course,
        tasks=tasks,
        regions={id: replace(row, points=points[id]) for id, row in kept.items()},
        dropped={id: row for id, row in course.regions.items() if id not in kept},
        left_out=frozenset(id for id, row in course.regions.items() if row.task in tasks) - kept.keys() - solved,
        may_change=tuple(name for name in course.may_change if name.partition("/")[0] not in folders),
    )


def scaled(points: Mapping[str, int], total: int) -> dict[str, int]:
    """Return points of the same proportions that add up to `total`: rounded down, and what remains goes to the largest
    remainders, the earlier of equal ones."""
    whole = sum(points.values()) or 1
    rounded = {id: share * total // whole for id, share in points.items()}
    by_remainder = sorted(points, key=lambda id: -(points[id] * total % whole))
    for id in by_remainder[: total - sum(rounded.values())]:
        rounded[id] += 1
    return rounded


def contradictions(course: Course, chosen: Sequence[str], where: str) -> list[str]:
    """What does not fit together in the rows, and in what the first lines choose of them."""
    return list(map(f"{where}: {{}}".format, (*_wrong_choices(course, chosen), *_wrong_rows(course))))


def _wrong_choices(course: Course, chosen: Sequence[str]) -> Iterator[str]:
    known = f"one of {', '.join(course.tasks)}"
    if not re.fullmatch("[a-z][a-z0-9]*", course.name):
        yield f"name: expected small letters and digits, got {course.name!r}"
    if course.carried not in CARRIED:
        yield f"carried: expected one of {', '.join(CARRIED)}, got {course.carried!r}"
    for id in chosen:
        if id not in course.tasks:
            yield f"tasks: expected {known}, got {id!r}"
        elif course.tasks[id].bonus and course.bonus < 1:
            yield f"tasks names {id!r}, but bonus = {course.bonus}; give the bonus its points, or leave {id!r} out"
    if not any(not course.tasks[id].bonus for id in chosen if id in course.tasks):
        yield f"tasks: expected at least one task whose points are in the total, got {', '.join(chosen) or 'none'}"
    for id in course.graded:
        if id not in course.regions:
            yield f"graded: expected regions of bonus lessons, got {id!r}, which is not in the table"
        elif not course.regions[id].bonus:
            yield f"graded: region {id} is no bonus lesson; it counts if its task is in `tasks`"
    if course.total < 1 or course.bonus < 0:
        yield f"expected a total of at least 1 and a bonus of at least 0, got {course.total} and {course.bonus}"
    if course.own_run_points < 0:
        yield f"own_run_points: expected at least 0, got {course.own_run_points}"
    for id, date in course.due.items():
        if id not in course.tasks:
            yield f"due: expected {known}, got {id!r}"
        elif not course.tasks[id].bonus and id not in chosen:
            yield f"due.{id}: the task is not in `tasks`; remove the date, or add the task"
        if not isinstance(date, datetime) or date.tzinfo is None:
            yield f"due.{id}: expected a time with its zone, such as 2026-02-13T23:59:00-05:00; got {date}"


def _wrong_rows(course: Course) -> Iterator[str]:
    for region in course.regions.values():
        if unknown := set(region.needs) - set(course.regions):
            yield f"region {region.id} needs {min(unknown)}, which is not in the table; fix `needs`"
        if region.id in course.all_needs(region.id):
            yield f"region {region.id} needs itself in a circle; fix `needs`"
        if not course.may_student_change(region.file):
            yield f"region {region.id} is in {region.file}, which may_change does not list"


def without_points(course: Course, where: str) -> list[str]:
    none = [region for region in course.regions.values() if region.points < 1]
    key = {True: "bonus", False: "total"}
    return [
        f"{where}: {key[row.bonus]} = {getattr(course, key[row.bonus])} leaves no point for region {row.id}; raise it"
        for row in none
    ]
