"""The rule of hidden tests, and the only place that states it:

- They are in the files of [hidden] in course.toml, and do not ship.
- staff.grade and Gradescope run them both, so a hand-in has the same points in both.
- They share the points of their region with its other tests, so no total depends on them. Each is worth at least one
  point of its region (grader/weights.py raises its weight if it must).
- While they are hidden (any `visibility` but "visible"), what a student can read has the other tests and their points
  alone: the student's page, report.json, the texts on Gradescope, and Classroom 50's list. The grade book, Gradescope's
  score and what is for staff count all.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common.errors import InputError
from common.paths import ROOT
from course.graded_tests import marked
from course.table import Course, files_matching, load_course, score_of
from staff.grade.gradebook import GradedHandIn

VISIBLE = "visible"
VISIBILITIES = (VISIBLE, "hidden", "after_due_date", "after_published")


def hidden_files() -> list[str]:
    """The files of hidden tests."""
    patterns = load_course().hidden.get("tests", [])
    return [file for file in files_matching(ROOT, patterns) if Path(file).name.startswith("test_")]


def visibility(test: str, course: Course) -> str:
    """Tests of the handout are visible; for hidden ones course.toml decides."""
    return str(course.hidden.get("visibility", "hidden")) if test.startswith("staff/") else VISIBLE


def visible_part(row: GradedHandIn, course: Course) -> GradedHandIn:
    """What a student may read of a hand-in's results: without tests that are hidden, and the points of the others."""
    tests = [test for test in row.tests if visibility(test["id"], course) == VISIBLE]
    sums = ("score", "max_score", "bonus", "max_bonus", "not_graded_here")
    others = {key: value for key, value in row.report.items() if key not in sums}
    some = {"hidden": True} if len(tests) < len(row.tests) else {}
    return replace(row, report=others | score_of(tests, course.bonus_regions) | {"tests": tests} | some)


def contradictions(course: Course) -> Iterator[str]:
    """What does not fit together in [hidden], a line each."""
    kind = course.hidden.get("visibility")
    if course.hidden.get("tests") and kind not in VISIBILITIES:
        yield f"course.toml: hidden.visibility: expected one of {', '.join(VISIBILITIES)}; got {kind!r}"
    marks = (values for file in hidden_files() for _, values, _ in marked(ROOT, file, "graded"))
    for region, count in Counter(str(values[0]) for values in marks).items():
        if region in course.regions and course.regions[region].points <= count:
            points = f"{course.regions[region].points} points for its tests and {count} hidden ones"
            yield f"course.toml: region {region} has {points}; raise its points, or remove hidden tests"


def check(course: Course) -> None:
    """Raise InputError for the first contradiction."""
    if first := next(contradictions(course), None):
        raise InputError(first)
