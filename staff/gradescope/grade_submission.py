"""Grades the one submission of a container, hidden tests included, in the time that the platform gives."""

import tempfile
import time
from pathlib import Path

from staff.grade.gradebook import GradedHandIn
from staff.grade.hand_ins import Grading, grader_files
from staff.grade.hidden_tests import hidden_files
from staff.grade.result_store import at_work
from staff.grade.submissions import Submission
from staff.gradescope.results import MARGIN


def grade_one(submission: Path, timeout: float) -> GradedHandIn:
    """Grade a folder; `timeout` is the platform's, in seconds from now. What is not reached by then has no points."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, at_work(Path(folder)) as scratch:
        grading = Grading.prepare(Path(folder), scratch, grader_files() + hidden_files(), seed=None, deadline=timeout)
        grading.deadline = max(1.0, timeout - MARGIN - (time.monotonic() - start))
        return grading.grade(Submission("submission", submission))[0]
