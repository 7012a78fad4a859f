"""Show what follows from course.toml, and try it.

    python -m staff.course           # tasks, points, what is left out, dates, and every contradiction in a line
    python -m staff.course --try     # also build the course, and grade it untouched and solved, in all three ways

The last line of stdout is JSON; the exit code is 0 only if nothing contradicts itself, and every try gave its points.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from common.errors import exit_on_input_error
from common.paths import ROOT
from course.table import Course, RegionRow, Task, read_course
from staff.grade import hidden_tests
from staff.handout.assemble import Handout, assemble
from staff.proofs.course_trial import Trial, run_trials

COLUMNS = "{:5} {:>6}  {:60} {}"


def table(course: Course) -> Iterator[str]:
    """The course in one screen: a line for each task, and what is left out."""
    extra = sum(course.regions[id].points for id in course.bonus_regions)
    yield f"{course.name}: {course.title}; {course.total} points" + (f" and {extra} bonus points" if extra else "")
    yield COLUMNS.format("task", "points", "regions", "due").rstrip()
    for task in course.tasks.values():
        rows = [row for row in course.regions.values() if row.task == task.id]
        for is_bonus in (False, True):
            if part := [row for row in rows if row.bonus == is_bonus]:
                yield from _lines(task, part, course)
    if kind := course.hidden.get("visibility"):
        yield f"hidden tests: {kind}"
    if course.dropped:
        yield f"left out: {', '.join(course.dropped)}"


def _lines(task: Task, rows: Sequence[RegionRow], course: Course) -> Iterator[str]:
    due = course.due.get(task.id)
    first = [task.id, f"{'+' if rows[0].bonus else ''}{sum(row.points for row in rows)}"]
    last = f"{due:%Y-%m-%d %H:%M %Z}" if due else "no date"
    words = [f"{row.id} ({row.points})" for row in rows]
    for start in range(0, len(words), 6):
        yield COLUMNS.format(*first, ", ".join(words[start : start + 6]), last).rstrip()
        first, last = ["", ""], ""


def given_solved(handout: Handout) -> str:
    """Which of the regions that are left out have lines in files that ship: students get them solved."""
    return f"of these given out solved, in files that ship: {', '.join(handout.given_solved) or 'none'}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m staff.course", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--try", action="store_true", dest="tries", help="build and grade it; takes some minutes")
    options = parser.parse_args(argv)
    course, contradictions = read_course(ROOT / "course.toml")
    trials: list[Trial] = []
    if not contradictions:
        print("\n".join(table(course)))
        handout = assemble(ROOT)
        contradictions = [*hidden_tests.contradictions(course), *handout.problems]
        if course.dropped:
            print(given_solved(handout))
        if options.tries and not contradictions:
            for trial in run_trials(handout, course):
                print(trial, flush=True)
                trials.append(trial)
    for line in contradictions:
        print(f"contradiction: {line}")
    failed = [trial.name for trial in trials if trial.wrong]
    figures = {"tasks": list(course.tasks), "total": course.total, "contradictions": len(contradictions)}
    print(json.dumps(figures | {"tried": len(trials), "failed": failed}))
    sys.exit(1 if contradictions or failed else 0)


if __name__ == "__main__":
    exit_on_input_error(main)
