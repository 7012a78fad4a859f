"""Write the points of a graded class into the table that a learning platform exports, and imports again.

    python -m staff.export canvas graded/ gradebook.csv --column "Assignment 1 (31337)" > import.csv
    python -m staff.export moodle graded/ worksheet.csv > import.csv

canvas: the grade book, as Grades > Export gives it. moodle: the grading worksheet of the assignment. The class must be
graded with --roster. A row belongs to a person if one of its cells is the id, an address that begins with the id, or
"Participant ID". All other cells stay what they are, and so do rows of people without a hand-in. Moodle silently skips
points above the maximum, which a bonus can give: then the maximum is written, and a note says so.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from staff.grade.roster import UNREADABLE

GRADES = "grades.csv"
MOODLE_GRADE, MOODLE_MOST = "Grade", "Maximum Grade"
CANVAS_MOST = "Points Possible"  # in the first cell of the row with the most points of each column
Row = dict[str, str]


def read_table(path: Path) -> list[Row]:
    """Return the rows of a table with a heading. Raises InputError if it is none."""
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: expected a table in UTF-8, with commas between its columns; got {error}") from None
    if not rows or len(rows[0]) < 2 or any(None in row or None in row.values() for row in rows):
        raise InputError(f"{path}: expected a heading, and rows with as many cells and commas between; export it again")
    return rows


def read_grades(graded: Path) -> dict[str, Row]:
    """Return the rows of grades.csv by the person's id; those without a hand-in or a person are left out."""
    if not (graded / GRADES).exists():
        raise InputError(f"{graded}: expected {GRADES}; run staff.grade with --roster, which names everybody")
    return {row["id"].casefold(): row for row in read_table(graded / GRADES) if row["id"] and row["score"]}


def points(grade: Row) -> str:
    return f"{float(grade['score']) + float(grade['bonus']):g}"


def of_report(grades: dict[str, Row]) -> dict[str, Row]:
    """Return the rows with the points of the report in place of those of the code (staff/rubric.py)."""
    entered = {id: row for id, row in grades.items() if row["report"]}
    return {
        id: row | {"score": row["report"], "bonus": "0", "max_score": row["max_report"]} for id, row in entered.items()
    }


def ids_in(row: Row) -> set[str]:
    """Return what may be the id of the person that a row is about."""
    cells = [cell.strip().casefold() for cell in row.values()]
    return {*cells, *(cell.partition("@")[0] for cell in cells), *(cell.removeprefix("participant ") for cell in cells)}


def fill(rows: Sequence[Row], column: str, cells: dict[str, str]) -> set[str]:
    """Write the `cells` of each person into a column. Return the ids for which there is a row.

    Raises:
        InputError: no such column, or a row with the ids of two people.
    """
    if column not in rows[0]:
        raise InputError(f"--column: expected one of {', '.join(map(repr, rows[0]))}; got {column!r}")
    filled = set[str]()
    for row in rows:
        ids = ids_in(row) & cells.keys()
        if len(ids) > 1:
            raise InputError(f"a row has the ids of several people ({', '.join(sorted(ids))}); choose other ids")
        for id in ids:
            row[column] = cells[id]
        filled |= ids
    return filled


def most_points(platform: str, rows: Sequence[Row], column: str) -> float | None:
    """Return the most points that the platform expects in this column, if the table says it."""
    cells = [row.get(MOODLE_MOST, "") for row in rows]
    if platform == "canvas":
        cells = [row[column] for row in rows if next(iter(row.values())).strip() == CANVAS_MOST]
    try:
        return float(cells[0].replace(",", ".")) if cells and cells[0] else None
    except ValueError:
        return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m staff.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("platform", choices=("canvas", "moodle"))
    parser.add_argument("graded", type=Path, metavar="DIR", help="what staff.grade has written")
    parser.add_argument("table", type=Path, metavar="CSV", help="the table that the platform has exported")
    parser.add_argument("--column", default="", help="the assignment's column (moodle: Grade)")
    parser.add_argument("--report", action="store_true", help="the points of the reports, into a column of their own")
    options = parser.parse_args(argv)
    if options.platform == "canvas" and not options.column:
        raise InputError('canvas: name the assignment\'s column, such as --column "Assignment 1 (31337)"')
    grades, rows = read_grades(options.graded), read_table(options.table)
    if options.report and not (grades := of_report(grades)):
        raise InputError(f"{options.graded}: no report has points yet; run staff.rubric --enter first")
    column = options.column or MOODLE_GRADE
    if not grades:
        raise InputError(f"{options.graded}/{GRADES}: nobody in it has points; its notes say why")
    cells = {id: points(row) for id, row in grades.items()}
    most = max(float(row["max_score"]) for row in grades.values())
    if options.platform == "moodle":
        for id in sorted(id for id, cell in cells.items() if float(cell) > most):
            print(f"note: {grades[id]['id']} has {cells[id]} points; Moodle takes at most {most:g}", file=sys.stderr)
            cells[id] = f"{most:g}"
    filled = fill(rows, column, cells)
    expected = most_points(options.platform, rows, column)
    if expected is not None and expected != most:
        raise InputError(
            f"the platform expects at most {expected:g} points, the course has {most:g}: set {most:g} there"
        )
    table = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    for id in sorted(id for id in filled if UNREADABLE in grades[id]["notes"]):
        print(f"note: {grades[id]['id']} has {points(grades[id])} points: {UNREADABLE}", file=sys.stderr)
    for id in sorted(grades.keys() - filled):
        print(f"note: {options.table} has no row for {grades[id]['id']}", file=sys.stderr)
    print(f"{len(filled)} of {len(rows)} rows have points", file=sys.stderr)


if __name__ == "__main__":
    exit_on_input_error(main)
