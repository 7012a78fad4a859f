"""The points that people give: read from a table that they have filled in, and kept beside the grade book."""

import csv
from collections.abc import Mapping
from pathlib import Path

from common.errors import InputError

FILE = "report_points.csv"  # beside gradebook.csv
NAME = "hand-in"


def write_points(path: Path, most: Mapping[str, int], rows: Mapping[str, Mapping[str, str]]) -> None:
    """Write a table with a column for each question, whose head says how many points it has."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([NAME, *(f"{question} /{points}" for question, points in most.items())])
        table.writerows([name, *(row[question] for question in most)] for name, row in rows.items())


def read_points(path: Path) -> dict[str, tuple[float, float]]:
    """Return hand-in -> its points and the most there are. An empty cell is not graded yet and counts as 0.

    Raises:
        InputError: not such a table, or points below 0 or above what its column's head says.
    """
    try:
        head, *lines = [line for line in csv.reader(path.read_text(encoding="utf-8-sig").splitlines()) if any(line)]
        most = {title: float(title.rpartition("/")[2]) for title in head[1:]}
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: expected the table that staff.rubric has written, got {error}") from None
    points: dict[str, tuple[float, float]] = {}
    for name, *cells in lines:
        if name in points or len(cells) != len(most):
            raise InputError(f"{path}: expected {name} once, with {len(most)} points; delete or complete its line")
        points[name] = (
            sum(_checked(path, name, *pair) for pair in zip(most.items(), cells, strict=True)),
            sum(most.values()),
        )
    return points


def _checked(path: Path, name: str, column: tuple[str, float], cell: str) -> float:
    try:
        value = float(cell.strip().replace(",", ".") or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= column[1]:
        raise InputError(f"{path}: {name}, {column[0]}: expected points from 0 to {column[1]:g}, got {cell!r}")
    return value
