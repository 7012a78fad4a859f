"""Writes the files of a class, gradebook.csv, changes.csv and index.html, from what is kept of each hand-in."""

import contextlib
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.paths import atomic_write, locked
from course.table import Course
from staff.grade import gradebook, pages, result_store
from staff.grade.changes import write_changes
from staff.grade.gradebook import GradedHandIn
from staff.grade.roster import read_roster, write_grades
from staff.reports.points import FILE, read_points

ROSTER = "roster.csv"  # kept beside the results, so that a late hand-in is graded without naming it again


def write_class(
    out: Path, names: Sequence[str], course: Course, footer: str, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Write the files for those of `names` that are graded, and for all others that were ever graded into this folder,
    in the order of their names. Returns the figures of each.

    Parts of a class may call it at the same time: one after the other writes.
    """
    with locked(out / ".gradebook"):
        names = sorted({*names, *result_store.graded(out)} - {*without})
        points = read_points(out / FILE) if (out / FILE).exists() else {}
        rows = [row for name in names for row in _graded(out, name, course, points)]
        missing = sorted(set(names) - {row.name for row in rows})
        gradebook.write_csv(out / "gradebook.csv", rows, course)
        write_changes(out / "changes.csv", out, rows)
        if (out / ROSTER).exists():
            write_grades(out / "grades.csv", read_roster(out / ROSTER), rows)
        if rows:
            with atomic_write(out / "index.html") as file:
                file.write(pages.class_page(rows, course, footer, missing))
    return [figures_of(row) for row in rows]


def _graded(
    out: Path, name: str, course: Course, report_points: Mapping[str, tuple[float, float]]
) -> list[GradedHandIn]:
    """One row, or none where the hand-in is not graded yet or its files are damaged, however they are."""
    with contextlib.suppress(Exception):
        row = result_store.read(out, name)
        row.run["report_points"] = report_points.get(name)
        figures_of(row)
        gradebook.cells_of(row, course)
        return [row]
    return []


def figures_of(row: GradedHandIn) -> dict[str, Any]:
    return {
        "name": row.name,
        "score": row.report["score"],
        "max_score": row.report["max_score"],
        "bonus": row.report.get("bonus", 0),
        **{key: row.run[key] for key in ("unreadable", "wall_s", "peak_pss_mb")},
        "look_at_by_hand": bool(row.run.get("flags")),
    }


def summary(rows: Sequence[dict[str, Any]], graded_now: dict[str, bool], seconds: float) -> dict[str, Any]:
    """The figures of this run. Memory is that of one job, graders and ranks together, shared pages once."""
    in_this_run = [row for row in rows if row["name"] in graded_now]
    now = [row for row in in_this_run if graded_now[row["name"]]]
    return {
        "submissions": len(in_this_run),
        "graded": len(now),
        "kept": len(in_this_run) - len(now),
        "unreadable": sum(row["unreadable"] for row in in_this_run),
        "mean_score": round(statistics.fmean([row["score"] for row in in_this_run] or [0]), 1),
        "max_score": max((row["max_score"] for row in in_this_run), default=0),
        "look_at_by_hand": sum(row["look_at_by_hand"] for row in in_this_run),
        "seconds": round(seconds, 1),
        "submissions_per_hour": round(3600 * len(now) / seconds, 1) if now else None,
        "longest_s": max((row["wall_s"] for row in now), default=None),
        "peak_pss_mb": max((row["peak_pss_mb"] for row in now if row["peak_pss_mb"]), default=None),
    }
