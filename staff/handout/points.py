"""Writes the points of course.toml into the READMEs' tables of regions, so that only the table needs a change.

A row begins with a region's id and ends with its points. Rows of regions that the course does not have are left out; in
a row without an id, the last number is a sum: of the total, or of the bonus.
"""

import re

from course.table import Course

REGION = re.compile(r"\| ([0-9a-z]+\.[0-9]+) \|.*\| \d+ \|")
SUM = re.compile(r"\| (?:[0-9a-z.]+ to [0-9a-z.]+ )?\|.*\b(total|bonus)\b.*\| \d+ \|")
LAST_NUMBER = re.compile(r"\d+(?= \|$)")


def with_points(text: str, course: Course) -> str:
    """Return a README with the points of the course."""
    bonus = sum(course.regions[id].points for id in course.bonus_regions)
    sums = {"total": course.total, "bonus": bonus}
    lines = []
    for line in text.split("\n"):
        points: int | None = None
        if row := REGION.fullmatch(line):
            region = course.regions.get(row[1])
            points = region.points if region else 0
        elif row := SUM.fullmatch(line):
            points = sums[row[1]]
        if points is None:
            lines.append(line)
        elif points:
            lines.append(LAST_NUMBER.sub(str(points), line))
    return "\n".join(lines)
