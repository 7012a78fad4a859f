"""Grades the one submission of a container, hidden tests included, in the time that the platform gives."""

import tempfile
import time
from pathlib import Path

from common.errors import InputError
from course.table import load_course
from staff.grade.gradebook import GradedHandIn
from staff.grade.hand_ins import Grading, grader_files, hidden_files
from staff.grade.result_store import at_work
from staff.grade.submissions import Submission
from staff.gradescope.results import VISIBILITIES

MARGIN = 40.0  # seconds before the platform's time-out: to end the graders, to sweep, to write


def grade_one(submission: Path, timeout: float) -> GradedHandIn:
    """Grade a folder; `timeout` is the platform's, in seconds from now. What is not reached by then has no points."""
    start = time.monotonic()
    visibility = load_course().hidden.get("visibility")
    if visibility not in VISIBILITIES:
        raise InputError(
            f"course.toml: hidden.visibility: expected one of {', '.join(VISIBILITIES)}; got {visibility!r}"
        )
    with tempfile.TemporaryDirectory() as folder, at_work(Path(folder)) as scratch:
        grading = Grading.prepare(Path(folder), scratch, grader_files() + hidden_files(), seed=None, deadline=timeout)
        grading.deadline = max(1.0, timeout - MARGIN - (time.monotonic() - start))
        return grading.grade(Submission("submission", submission))[0]
