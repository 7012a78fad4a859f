"""Grades the one submission of a Gradescope container; run_autograder calls it as root.

The platform's time-out leaves a score of 0, so there is an earlier deadline of our own, after which the points earned
until then are reported.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common.course import load_course
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, atomic_write
from staff.gradescope.results import VISIBILITIES, late_days, results, unfinished
from staff.grading import Grading, at_work, grader_files, hidden_files
from staff.submissions import Submission

MARGIN = 40.0  # seconds before the platform's time-out: to end the graders, to sweep, to write


def main(argv: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    options = _options(argv)
    path, course = options.folder / "results" / "results.json", load_course()
    if course.hidden.get("visibility") not in VISIBILITIES:
        raise InputError(f"course.toml: hidden.visibility: expected one of {', '.join(VISIBILITIES)}")
    _write(path, unfinished(course, "The autograder was ended before it had a result. Please submit again."))
    _close(ROOT / "staff", path.parent, options.folder / "submission_metadata.json")
    with tempfile.TemporaryDirectory() as folder, at_work(Path(folder, "out")) as scratch:
        out = Path(folder, "out")
        files = grader_files() + hidden_files()
        seed = random.SystemRandom().randrange(2**30)
        deadline = max(1.0, options.timeout - MARGIN - (time.monotonic() - start))
        grading = Grading.prepare(out, scratch, files, seed=seed, deadline=deadline)
        grading.grade(Submission("submission", options.folder / "submission"))
        row = grading.read("submission")
    late = late_days(options.folder / "submission_metadata.json")
    _write(path, results(row, course, late, time.monotonic() - start))
    print(json.dumps({"score": row.report["score"], "max_score": row.report["max_score"], "late_days": late}))


def _write(path: Path, content: dict) -> None:
    with atomic_write(path) as file:
        json.dump(content, file, indent=1)


def _close(*paths: Path) -> None:
    """Hidden tests, earlier results and the names of students are for root only."""
    for path in paths:
        if path.exists() and os.getuid() == 0:
            path.chmod(0o700 if path.is_dir() else 0o600)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("/autograder"), help="Gradescope's folder")
    parser.add_argument("--timeout", type=float, default=600, help="seconds, as set on Gradescope (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_input_error(main)
