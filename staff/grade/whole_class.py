"""Grade a class: read folders and zips; write a report and a page for each, a grade book and an overview.

    python -m staff.grade submissions/* --out graded --jobs 2
    python -m staff.grade submissions/* --out graded --part 3/16      # one share of the class, on this machine

The command writes DIR/hand_ins/NAME/report.json and index.html for each submission, DIR/gradebook.csv, changes.csv,
index.html, and grades.csv where there is a roster. If a run is interrupted, start it again: results are reused unless
the submission, the graders or the course have changed. Parts share DIR and may run at the same time; each adds its
results to the one grade book when it ends.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from grader.wire.processes import descendants, kill_all
from staff.grade import result_store
from staff.grade.class_files import ROSTER, summary, write_class
from staff.grade.gradebook import GradedHandIn
from staff.grade.hand_ins import DEADLINE, Grading, grader_files, not_graded_here
from staff.grade.hidden_tests import hidden_files
from staff.grade.own_process import Unfinished, run_apart
from staff.grade.roster import coverage, read_roster
from staff.grade.submissions import Submission, name_all
from staff.sandbox.graded_run import refuse_exposed

MOST_UNREADABLE = 1 / 5  # of the hand-ins of one run; more are hardly all the students' own fault
CLASS_TIME = 600.0  # seconds to write the grade book and the overview, waiting for other parts included


def grade_all(grading: Grading, submissions: Sequence[Submission], jobs: int) -> dict[str, bool]:
    """Grade `jobs` submissions at a time. Returns for each, by name, whether it was graded now or before.

    A submission that our own graders fail on is left out; stderr says so.
    """
    graded_now: dict[str, bool] = {}
    processors = iter(processors_of_jobs(sorted(os.sched_getaffinity(0)), jobs))

    def begin() -> None:
        os.sched_setaffinity(0, next(processors))  # of this thread, and of all that it starts

    with ThreadPoolExecutor(jobs, initializer=begin) as pool:
        futures = {pool.submit(grading.grade, submission): submission for submission in submissions}
        try:
            for future in as_completed(futures):
                name = futures[future].name
                if error := future.exception():
                    print(f"{name}: not graded: {type(error).__name__}: {error}", file=sys.stderr)
                    continue
                row, graded_now[name] = future.result()
                with contextlib.suppress(Exception):  # to print it must not cost the others anything
                    print_line(row, graded_now[name], f"{len(graded_now)}/{len(submissions)}")
        except BaseException:  # Ctrl-C, too, leaves nothing running
            grading.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all(lambda: descendants(os.getpid(), set()))  # or Ctrl-C would wait for every deadline
            raise
    return graded_now


def processors_of_jobs(processors: Sequence[int], jobs: int) -> list[set[int]]:
    """The processors of each job, so that none slows down the others; where there are more jobs, several share one."""
    if jobs > len(processors):
        return [{processors[job % len(processors)]} for job in range(jobs)]
    return [set(processors[job::jobs]) for job in range(jobs)]


def print_line(row: GradedHandIn, now: bool, count: str) -> None:
    """Print one line as soon as a submission is done."""
    figures = f"{row.run['wall_s']:6.1f} s  {row.run['peak_pss_mb'] or 0:6.0f} MB" if now else "already graded"
    score = f"{row.report['score']:3} of {row.report['max_score']}"
    score += f" + {row.report['bonus']:2} of {row.report['max_bonus']} bonus" if row.report.get("max_bonus") else ""
    review = ["needs manual review"] if row.run.get("flags") else []
    notes = "; ".join([*review, *row.run["notes"]])
    print(f"{count:>7}  {score}  {figures}  {row.name}  {notes[:100]}".rstrip(), flush=True)


def in_part(submissions: Sequence[Submission], part: str) -> list[Submission]:
    """The submissions of part "3/16": every sixteenth by name, so that each is in one part whatever the order.

    Raises:
        InputError: a part that is none.
    """
    if not part:
        return list(submissions)
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise InputError(f"--part: expected NUMBER/PARTS such as 3/16, got {part!r}")
    return sorted(submissions, key=lambda submission: submission.name)[int(number) - 1 :: int(parts)]


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    refuse_exposed([ROOT, options.out, Path(tempfile.gettempdir()), *options.submissions])
    if options.roster:
        read_roster(options.roster)  # what is wrong with it is said now, and not after hours
    submissions = name_all(options.submissions, result_store.original_names(options.out))
    to_grade = in_part(submissions, options.part)
    start = time.monotonic()
    with result_store.at_work(options.out, options.part.replace("/", "-of-")) as scratch:
        if options.roster:
            result_store.write(options.out / ROSTER, options.roster.read_text(encoding="utf-8-sig"))
        tests = options.tests or grader_files() + ([] if options.no_hidden else hidden_files())
        grading = Grading.prepare(
            options.out,
            scratch,
            tests,
            seed=options.seed,
            deadline=options.deadline,
            fresh_inputs=options.fresh_inputs,
            again=options.again or bool(options.solution),
            solution=options.solution,
            allow_lower=options.allow_lower,
        )
        print("".join(f"{line}\n" for line in not_graded_here(grading.catalogue)), end="", flush=True)
        graded_now = grade_all(grading, to_grade, options.jobs)
        failed = {submission.name for submission in to_grade} - set(graded_now)
        names = [submission.name for submission in submissions]
        footer = f"Sandbox: {json.dumps(grading.sandbox)}"
        try:
            rows = run_apart(write_class, options.out, names, grading.course, footer, failed, seconds=CLASS_TIME)
        except Unfinished as error:
            raise InputError(
                f"{options.out}/gradebook.csv could not be written: {error}; run the command again"
            ) from None
    figures = summary(rows, graded_now, time.monotonic() - start) | {"not_graded": len(failed), "class": len(rows)}
    of_these = len({row["name"] for row in rows} & set(names))
    earlier = f", and {len(rows) - of_these} from earlier runs" if len(rows) > of_these else ""
    print(f"{of_these} of {len(submissions)} graded{earlier}: {options.out}/index.html, {options.out}/gradebook.csv")
    if (roster := options.out / ROSTER).exists():
        print(coverage(read_roster(roster), [row["name"] for row in rows]))
    if too_many := figures["unreadable"] > MOST_UNREADABLE * figures["submissions"]:
        words = "is this how your platform packs them? see each one's note in the grade book"
        print(f"warning: {figures['unreadable']} of {figures['submissions']} cannot be read: {words}", file=sys.stderr)
    print(json.dumps(figures))
    sys.exit(1 if failed or too_many else 0)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m staff.grade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "submissions", nargs="+", type=Path, metavar="SUBMISSION", help="a folder or a zip; or a name in DIR"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for results; existing results are reused"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="submissions graded in parallel (%(default)s)",
    )
    parser.add_argument("--part", default="", metavar="K/N", help="grade only share K of N")
    parser.add_argument(
        "--seed",
        type=int,
        help="seed of the inputs of every hand-in (default: each has its own, which is in its report)",
    )
    deadline = DEADLINE * float(os.environ.get("COS598D_SLOWNESS", "1"))
    parser.add_argument("--deadline", type=float, default=deadline, help="seconds for one submission (%(default)s)")
    parser.add_argument(
        "--fresh-inputs", action="store_true", help="draw new inputs for hand-ins that are graded again, too"
    )
    parser.add_argument("--again", action="store_true", help="grade also what has not changed since it was graded")
    parser.add_argument(
        "--allow-lower",
        action="store_true",
        help="let points fall where the same hand-in is graded again (default: the earlier results are kept)",
    )
    parser.add_argument(
        "--roster", type=Path, metavar="CSV", help="who takes the course, for DIR/grades.csv; see staff/grade/roster.py"
    )
    parser.add_argument(
        "--solution",
        default="",
        metavar="REGION",
        help="after the deadline: compare this region on the pages with ours",
    )
    parser.add_argument("--no-hidden", action="store_true", help="leave out the hidden tests")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="run only these tests (files or pytest node ids)")
    options = parser.parse_args(argv)
    known = [path if path.exists() else result_store.path_of(options.out, path.name) for path in options.submissions]
    options.submissions = [new or path for new, path in zip(known, options.submissions, strict=True)]
    if missing := [path for path in options.submissions if not path.exists()]:
        raise InputError(f"{missing[0]}: no such folder or zip; check the path")
    if options.solution and options.solution not in load_course().regions:
        raise InputError(f"--solution: expected a region of the course, got {options.solution!r}")
    if options.jobs < 1:
        raise InputError(f"--jobs: expected at least 1, got {options.jobs}")
    if os.path.realpath(options.out) == str(ROOT) or options.out.is_file():
        raise InputError(
            f"--out {options.out}: expected a folder for results, got a file or the repository; choose another folder"
        )
    return options
