"""Grades the one submission of a Gradescope container; run_autograder calls it as root.

The platform's time-out leaves a score of 0, so there is an earlier deadline of our own, after which the points earned
until then are reported.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, atomic_write
from course.table import load_course
from staff.grade.gradebook import place_of
from staff.gradescope.grade_submission import grade_one
from staff.gradescope.results import late_days, results, too_slow, unfinished


def main(argv: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    options = _options(argv)
    path, metadata = options.folder / "results" / "results.json", options.folder / "submission_metadata.json"
    _write(path, unfinished("The autograder was stopped before it produced a result. Please submit again."))
    _allow_root_alone(ROOT / "staff", path.parent, metadata)
    try:
        late = late_days(metadata)
    except InputError as error:
        _write(path, unfinished(f"Nothing was graded: {error}"))
        raise
    row = grade_one(options.folder / "submission", options.timeout)
    seconds = time.monotonic() - start
    slow = too_slow(row, seconds, options.timeout)
    _write(path, results(row, load_course(), late, seconds, slow))
    if slow:  # the platform shows stdout to instructors only
        print(f"too slow: {slow}")
    for flag in row.run["flags"]:
        print(f"needs manual review: {place_of(flag)} {flag['what']}")
    print(json.dumps({"score": row.report["score"], "max_score": row.report["max_score"], "late_days": late}))


def _write(path: Path, content: dict) -> None:
    with atomic_write(path) as file:
        json.dump(content, file, indent=1)


def _allow_root_alone(*paths: Path) -> None:
    """Hide hidden tests, earlier results and the names of students from the users that ranks run as."""
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
