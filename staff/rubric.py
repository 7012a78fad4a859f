"""Grade reports with sheets: one for each hand-in, and a table for the points.

    python -m staff.rubric submissions/* --out sheets               # sheets/NAME.md and sheets/points.csv
    python -m staff.rubric --enter sheets/points.csv --out graded   # the points, into staff.grade's grade book

A sheet has each answer with what a full one contains, and the figures that it must cite beside those of the student's
records. Empty answers have 0 points in the table. Leave a cell empty until you have read the answer.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import shutil
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from course.table import load_course
from staff.grade import result_store
from staff.grade.class_files import write_class
from staff.reports.handed_in import unpacked
from staff.reports.points import FILE, read_points, write_points
from staff.reports.sheet import most_points, prefilled, sheet


def write_sheets(paths: list[Path], out: Path) -> None:
    course = load_course()
    out.mkdir(parents=True, exist_ok=True)
    table = out / "points.csv"
    if table.exists():
        raise InputError(f"{table} exists already and is not replaced; move it away, or choose another --out")
    with unpacked(paths, course) as hand_ins:
        for hand_in in hand_ins:
            with atomic_write(out / f"{hand_in.name}.md") as file:
                file.write(sheet(hand_in, hand_ins, course))
        write_points(table, most_points(course), {hand_in.name: prefilled(hand_in, course) for hand_in in hand_ins})
    print(f"{len(hand_ins)} sheets in {out}")
    print(f"next: fill in {table}, then run python -m staff.rubric --enter {table} --out graded")


def enter(table: Path, out: Path) -> None:
    points = read_points(table)
    if unknown := sorted(points.keys() - {*result_store.graded(out)}):
        raise InputError(f"{table}: {unknown[0]} is not graded in {out}; run staff.grade first, or delete the line")
    shutil.copyfile(table, out / FILE)
    names = result_store.graded(out)
    sandbox = json.dumps(result_store.read(out, names[0]).report["sandbox"])
    write_class(out, names, load_course(), f"Sandbox: {sandbox}")
    print(f"report points of {len(points)} hand-ins: {out}/gradebook.csv")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m staff.rubric", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submissions", nargs="*", type=Path, metavar="SUBMISSION", help="a folder or an archive")
    parser.add_argument("--out", type=Path, required=True, help="folder for sheets, or staff.grade's with --enter")
    parser.add_argument("--enter", type=Path, metavar="CSV", help="a table of points that you have filled in")
    arguments = parser.parse_args()
    if arguments.enter:
        enter(arguments.enter, arguments.out)
    elif not arguments.submissions:
        parser.error("name the hand-ins, or a filled-in table with --enter")
    else:
        write_sheets(arguments.submissions, arguments.out)


if __name__ == "__main__":
    exit_on_input_error(main)
