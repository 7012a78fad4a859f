"""Writes the points of course.toml into the READMEs' tables of regions, so that only the table needs a change.

A row begins with a region's id and ends with its points. Rows of regions that the course does not have are left out, or
say where they are given out solved; in a row without an id, the last number is a sum: of the total, or of the bonus.
Sentences name the total: "the 100 points", "on top of the 100".
"""

import re
from collections.abc import Mapping

from course.table import Course

REGION = re.compile(r"\| ([0-9a-z]+\.[0-9]+) \|.*\| \d+ \|")
SUM = re.compile(r"\| (?:[0-9a-z.]+ to [^|]+ )?\|.*\b(total|bonus)\b.*\| \d+ \|")
OF_ALL = re.compile(r"(\b[Tt]he )100( points\b|[.,;]? )")  # in sentences: "the 100 points", "on top of the 100"
LAST_NUMBER = re.compile(r"\d+(?= \|$)")


def with_points(text: str, course: Course, solved: Mapping[str, str]) -> str:
    """Return a page with the points of the course; `solved` has the files of regions that are given out solved."""
    bonus = sum(course.regions[id].points for id in course.bonus_regions)
    sums = {"total": course.total, "bonus": bonus}
    lines = []
    for line in text.split("\n"):
        points: int | None = None
        if (row := REGION.fullmatch(line)) and row[1] in solved:
            lines.append(" | ".join([*line.split(" | ")[:2], solved[row[1]], "given solved |"]))
            continue
        elif row:
            region = course.regions.get(row[1])
            points = region.points if region else 0
        elif row := SUM.fullmatch(line):
            points = sums[row[1]]
        if points is None:
            lines.append(line)
        elif points:
            lines.append(LAST_NUMBER.sub(str(points), line))
    return OF_ALL.sub(rf"\g<1>{course.total}\2", "\n".join(lines))
