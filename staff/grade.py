"""Grades a class: folders and zips in; a report and a page for each, a grade book and an overview out.

    python -m staff.grade submissions/*.zip --out graded --jobs 2

writes DIR/NAME/report.json and index.html for each submission, DIR/gradebook.csv and DIR/index.html. What is graded
stays, unless it, the graders or the course have changed since: a run that was killed is simply started again.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT, atomic_write
from staff import gradebook, pages
from staff.grading import DEADLINE, Grading, at_work, grader_files, hidden_files
from staff.submissions import Submission, name_all


def grade_all(grading: Grading, submissions: Sequence[Submission], jobs: int) -> dict[str, bool]:
    """Grade `jobs` submissions at a time. Returns for each, by name, whether it was graded now or before.

    One that our own graders fail on is left out, and said on stderr.
    """
    done: dict[str, bool] = {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(grading.grade, submission): submission for submission in submissions}
        try:
            for future in as_completed(futures):
                name = futures[future].name
                if error := future.exception():
                    print(f"{name}: not graded: {type(error).__name__}: {error}", file=sys.stderr)
                    continue
                done[name] = future.result()
                tell(grading, name, done[name], f"{len(done)}/{len(submissions)}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def tell(grading: Grading, name: str, now: bool, count: str) -> None:
    """One line as soon as a submission is done."""
    row = grading.read(name)
    figures = f"{row.run['wall_s']:6.1f} s  {row.run['peak_pss_mb'] or 0:6.0f} MB" if now else "graded before"
    score = f"{row.report['score']:3} of {row.report['max_score']}"
    print(f"{count:>7}  {score}  {figures}  {name}  {'; '.join(row.run['notes'])[:100]}".rstrip(), flush=True)


def write_class(grading: Grading, submissions: Sequence[Submission], footer: str) -> list[gradebook.Row]:
    """The grade book and the overview, of all submissions of this run, in their order."""
    rows = [grading.read(submission.name) for submission in submissions]
    gradebook.write_csv(grading.out / "gradebook.csv", rows, grading.course)
    if rows:
        with atomic_write(grading.out / "index.html") as file:
            file.write(pages.class_page(rows, grading.course, footer))
    return rows


def summary(rows: Sequence[gradebook.Row], done: dict[str, bool], seconds: float) -> dict:
    """The figures of this run. Memory is that of one job, graders and ranks together, shared pages once."""
    now = [row for row in rows if done[row.name]]
    peaks = [row.run["peak_pss_mb"] for row in now if row.run["peak_pss_mb"]]
    return {
        "submissions": len(rows),
        "graded": len(now),
        "kept": len(rows) - len(now),
        "unreadable": sum(row.run["unreadable"] for row in rows),
        "mean_score": round(statistics.fmean([row.report["score"] for row in rows] or [0]), 1),
        "max_score": max((row.report["max_score"] for row in rows), default=0),
        "seconds": round(seconds, 1),
        "submissions_per_hour": round(3600 * len(now) / seconds, 1) if now else None,
        "longest_s": max((row.run["wall_s"] for row in now), default=None),
        "peak_pss_mb": max(peaks, default=None),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    submissions = name_all(options.submissions)
    start = time.monotonic()
    with at_work(options.out) as scratch:
        tests = options.tests or grader_files() + (hidden_files() if options.hidden else [])
        grading = Grading.prepare(options.out, scratch, tests, seed=options.seed, deadline=options.deadline)
        done = grade_all(grading, submissions, options.jobs)
        graded = [submission for submission in submissions if submission.name in done]
        rows = write_class(grading, graded, f"Sandbox: {json.dumps(grading.sandbox)}")
    figures = summary(rows, done, time.monotonic() - start) | {"not_graded": len(submissions) - len(rows)}
    print(f"{len(rows)} submissions: {options.out / 'index.html'}, {options.out / 'gradebook.csv'}")
    print(json.dumps(figures))
    sys.exit(1 if figures["not_graded"] else 0)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("submissions", nargs="+", type=Path, metavar="SUBMISSION", help="a folder or a zip")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go, and are looked for")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="submissions at a time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**30), help="draw inputs again")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for one submission (%(default)s)")
    parser.add_argument("--hidden", action="store_true", help="the hidden tests of course.toml as well")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="only these graders: files, or pytest's ids")
    options = parser.parse_args(argv)
    if missing := [path for path in options.submissions if not path.exists()]:
        raise InputError(f"{missing[0]}: expected a folder or a zip, got nothing of this name; check the path")
    if options.jobs < 1:
        raise InputError(f"--jobs: expected at least 1, got {options.jobs}")
    if options.out.resolve() == ROOT or options.out.is_file():
        raise InputError(f"--out {options.out}: expected a folder for results, got something else; name a new one")
    return options


if __name__ == "__main__":
    exit_on_input_error(main)
