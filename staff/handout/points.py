"""Writes the points of course.toml into the READMEs' tables of regions, so that only the table needs a change.

A row begins with a region's id and ends with its points. Rows of regions that the course does not have are left out, or
say where they are given out solved; in a row without an id, the last number is a sum: of the total, or of the bonus.
Sentences name the total: "the 100 points", "on top of the 100". Where bonus lessons count in the total, no page calls
them optional.
"""

import re
from collections.abc import Mapping, Sequence

from course.rows import RegionRow
from course.table import Course

REGION = re.compile(r"\| ([0-9a-z]+\.[0-9]+) \|.*\| \d+ \|")
SUM = re.compile(r"\| (?:(?P<lessons>[0-9a-z.]+ to [^|]*|the other lessons) )?\|.*\b(?P<of>total|bonus)\b.*\| \d+ \|")
ON_TOP = ", a bonus on top of the 100"
OPTIONAL = "These lessons are optional: their points are a **bonus** on top of the 100."
OF_ALL = re.compile(r"(\b[Tt]he )100( points\b|[.,;]? )")  # in sentences: "the 100 points", "on top of the 100"
LAST_NUMBER = re.compile(r"\d+(?= \|$)")


def with_points(text: str, course: Course, solved: Mapping[str, str]) -> str:
    """Return a page with the points of the course; `solved` has the files of regions that are given out solved."""
    bonus = sum(course.regions[id].points for id in course.bonus_regions)
    sums = {"total": course.total, "bonus": bonus}
    in_total = [row for row in course.regions.values() if course.tasks[row.task].bonus and not row.bonus]
    lines = []
    for line in (_with_lessons_that_count(text, in_total, bonus > 0) if in_total else text).split("\n"):
        points: int | None = None
        if (row := REGION.fullmatch(line)) and row[1] in solved:
            lines.append(" | ".join([*line.split(" | ")[:2], solved[row[1]], "given solved |"]))
            continue
        elif row:
            region = course.regions.get(row[1])
            points = region.points if region else 0
        elif row := SUM.fullmatch(line):
            points = sums[row["of"]]
        if points is None:
            lines.append(line)
        elif points:
            lines.append(LAST_NUMBER.sub(str(points), line))
    return OF_ALL.sub(rf"\g<1>{course.total}\2", "\n".join(lines))


def _with_lessons_that_count(text: str, in_total: Sequence[RegionRow], others: bool) -> str:
    """Say of bonus lessons that count in the total that they do, and of the `others`, if there are any, that they are
    optional."""
    ids, points = ", ".join(row.id for row in in_total), sum(row.points for row in in_total)
    counted = f"{ids} count in the 100 points."
    if others:
        counted += " " + OPTIONAL.replace("These", "The other")
    lines = []
    for line in text.replace(OPTIONAL, counted).split("\n"):
        if (row := SUM.fullmatch(line)) and row["lessons"]:
            lines.append(
                LAST_NUMBER.sub(str(points), line.replace(row["lessons"], ids).replace(ON_TOP, ", in the total"))
            )
            line = line.replace(row["lessons"], "the other lessons")
        lines.append(line)
    return "\n".join(lines)
