"""Grades a submission into DIR/hand_ins/NAME; result_store.py says what is written there.

Reports have no times in them, so that equal submissions get equal reports. What is read of a hand-in is read in
processes of their own (own_process.py), and each step has a deadline: a hand-in that hangs one of them gets a report
that says so, and costs nobody else anything.
"""

import contextlib
import functools
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.paths import ROOT
from course.manifest import code_digest, version_of
from course.table import NOT_GRADED_HERE, Course, files_matching, load_course, score_in_words, score_of
from grader.session import SEED_BITS
from staff.grade import hidden_tests, result_store, texts
from staff.grade.gradebook import GradedHandIn
from staff.grade.own_process import Unfinished, run_apart
from staff.grade.own_texts import (
    Opened,
    Tests,
    compared,
    digest,
    empty_report,
    open_into,
    read_report,
    student_page,
    unreadable,
)
from staff.grade.submissions import Submission, clean_files, original_name
from staff.handout.assemble import renamed
from staff.handout.regions import find_regions
from staff.sandbox.graded_run import probe, run_graded

DEADLINE = 600.0  # seconds for the graders of one submission; single tests have shorter ones of their own
OPEN_TIME = 120.0  # seconds to unpack a hand-in, which has at most 64 MiB
PAGE_TIME = 60.0  # seconds to read the graders' report, and again to make the student's page
# What decides on points, beside the tests.
GRADERS = ("common/**/*.py", "course/*.py", "grader/**/*.py", "tests/conftest.py")
TEXTS_OF_THE_COURSE = ("title", "hints", "due", "handout")
PACKAGES = ("torch", "transformers", "numpy", "pytest")


def grader_files() -> list[str]:
    """The graders of course.toml, as far as they are there; whole scripts last, since they say the least about why."""
    tasks = load_course().tasks.values()
    files = [file for task in tasks for file in task.tests] + [file for task in tasks for file in task.whole]
    return [file for file in dict.fromkeys(files) if (ROOT / file).exists()]


@dataclass
class Grading:
    """What the submissions of one run share. `catalogue` has every test, as one that was never reached."""

    out: Path
    scratch: Path
    course: Course
    clean: dict[str, bytes]
    files: Sequence[str]
    catalogue: Tests
    graders_digest: str  # of all that decides on points
    sandbox: dict[str, object]
    seed: int | None  # None: each hand-in has its own, which it keeps
    deadline: float
    fresh_inputs: bool = False  # another seed for a hand-in that was graded before, too
    again: bool = False  # also what has not changed
    solution: str = ""  # a region whose solution the pages compare with what was handed in
    allow_lower: bool = False  # otherwise a hand-in that is graded again keeps its points if it would have fewer
    stop: threading.Event = field(default_factory=threading.Event)  # set when the whole run ends early

    @functools.cached_property
    def version(self) -> str:
        """The version of today's handout."""
        return version_of_handout(self.clean, self.course)

    @classmethod
    def prepare(
        cls, out: Path, scratch: Path, files: Sequence[str], *, seed: int | None, deadline: float,
        fresh_inputs: bool = False, again: bool = False, allow_lower: bool = False, solution: str = "",
    ) -> "Grading":  # fmt: skip
        """The clean tree and the list of tests, made once."""
        course = load_course()
        hidden_tests.check(course)
        catalogue, graders_digest = collect(scratch, files), digest(*_what_decides_on_points(files))
        return cls(
            out, scratch, course, clean_files(), files, catalogue, graders_digest, sandbox=probe(), seed=seed,
            deadline=deadline, fresh_inputs=fresh_inputs, again=again, solution=solution, allow_lower=allow_lower,
        )  # fmt: skip

    def grade(self, submission: Submission) -> tuple[GradedHandIn, bool]:
        """Grade a submission unless that is done already; return its results, and whether it was graded now.

        Whatever is wrong with the submission is in its report.
        """
        start = time.monotonic()
        folder = self.scratch / secrets.token_hex(8)  # a name that no other submission's code can guess
        folder.mkdir(mode=0o700)
        try:
            opened = self._open(submission, folder)
            fingerprint = digest(self.graders_digest.encode(), opened.digest.encode())
            if row := self._kept(submission, fingerprint):
                return row, False
            run: dict[str, Any] = {
                "notes": [*submission.notes, *opened.notes],
                "digest": fingerprint,
                "hand_in": opened.digest,
                "called": original_name(submission.path),
                "submitted": submission.submitted,
                "path": str(submission.path),
                "seed": self._seed(submission, opened.digest),
                "peak_pss_mb": None,
                "output": {},
                "flags": [],
                "unreadable": bool(opened.why),
                "measured": opened.measured,
            }
            if opened.why:
                run["notes"] = [opened.why, *submission.notes]
                crash = {"status": "crashed", "observed": "", **dict.fromkeys(("cause", "kind", "message"), opened.why)}
                tests = [test | crash for test in self.catalogue]
            else:
                tests = self._run(folder / "tree", folder / "report.json", run)
                if self.solution:
                    run["solution"] = self._compared(folder / "tree")
            if self.stop.is_set():  # our own end, not the submission's: nothing of it is kept
                raise InterruptedError("the class run was stopped")
            run["wall_s"] = round(time.monotonic() - start, 1)
            return self._keep(submission, tests, run), True
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _open(self, submission: Submission, folder: Path) -> Opened:
        try:
            return run_apart(
                open_into, submission.path, self.clean, self.course, folder, self.version, seconds=OPEN_TIME
            )
        except Unfinished as error:
            return unreadable(f"unpacking failed ({error})")

    def _compared(self, tree: Path) -> dict[str, str]:
        file = self.course.regions[self.solution].file
        regions = find_regions((ROOT / file).read_text(encoding="utf-8"), file)
        body = "\n".join(region.body for region in regions if region.id == self.solution)
        try:
            diff = run_apart(compared, tree, self.course, self.solution, body, seconds=PAGE_TIME)
        except Unfinished as error:
            diff = f"cannot be compared: {error}"
        return {"region": self.solution, "diff": diff}

    def _run(self, tree: Path, report: Path, run: dict[str, Any]) -> Tests:
        """The graders on a student's tree; every test of the catalogue, in its order."""
        inside = {"TMPDIR": str(self.scratch)}  # so that nothing is left behind, even by a killed run
        outcome = run_graded(tree, report, tests=self.files, seed=run["seed"], deadline_s=self.deadline, env=inside)
        try:
            reported = run_apart(read_report, report, seconds=PAGE_TIME)
        except Unfinished as error:
            reported = empty_report(f"the graders' report could not be read: {error}")
        notes = [*run["notes"], *reported["notes"]]
        if outcome.timed_out:
            run["stopped"] = True
            notes.append(f"the graders were stopped after {self.deadline:g} s, before the last test")
        elif outcome.exit_code not in (0, 1):
            notes.append(f"the graders did not finish (exit code {outcome.exit_code})")
            run["graders_said"] = texts.printable(outcome.output[-2000:])
        run |= {"peak_pss_mb": outcome.peak_pss_mb, "swept": outcome.swept, "sandbox": outcome.sandbox}
        run |= {"notes": notes, "output": reported["output"], "flags": reported["flags"]}
        tests_by_id = {test["id"]: test for test in reported["tests"]}
        return [tests_by_id.get(test["id"], test) for test in self.catalogue]

    def _seed(self, submission: Submission, hand_in: str) -> int:
        """The seed of its inputs: that of its last grading if it is the same hand-in, so that only what the graders
        changed changes its points. A new hand-in has a new one, since students can read the old one."""
        if self.seed is not None:
            return self.seed
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = result_store.read(self.out, submission.name).run
            if before["hand_in"] == hand_in and not self.fresh_inputs:
                return int(before["seed"])
        return secrets.randbits(SEED_BITS)

    def _kept(self, submission: Submission, fingerprint: str) -> GradedHandIn | None:
        """The results of an earlier run, if neither the submission nor the graders have changed since."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            row = result_store.read(self.out, submission.name)
            known = (row.run["digest"], None if self.allow_lower else row.run.get("lower"))
            return row if fingerprint in known and not self.again else None
        return None

    def _not_lower(self, row: GradedHandIn) -> GradedHandIn:
        """The new results; those before, if they are of the same hand-in and gave more points."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = result_store.read(self.out, row.name)
            if before.run["hand_in"] == row.run["hand_in"] and _points(before) > _points(row) and not self.allow_lower:
                note = f"graded again: {score_in_words(row.report)}; the earlier points are kept (--allow-lower)"
                result_store.keep_lower(self.out, row)
                notes = [*(note for note in before.run["notes"] if not note.startswith("graded again")), note]
                return replace(before, run=before.run | {"lower": row.run["digest"], "notes": notes})
        return row

    def _keep(self, submission: Submission, tests: Tests, run: dict[str, Any]) -> GradedHandIn:
        run["notes"] = texts.notes(run["notes"])
        report = {
            "submission": submission.name,
            **score_of(tests, self.course.bonus_regions),
            "tests": tests,
            "environment": versions() | {"seed": run.get("seed", self.seed)},
            "sandbox": run.pop("sandbox", self.sandbox),
        }
        row = self._not_lower(GradedHandIn(report, run))
        run = row.run
        shown = hidden_tests.visible_part(row, self.course)
        try:
            text = run_apart(student_page, shown.report, run, self.course, seconds=PAGE_TIME)
        except Unfinished as error:
            run["notes"] = [*run["notes"], f"the student's page could not be written: {error}"]
            text = f"<!doctype html><title>Points</title><p>{score_in_words(shown.report)}</p>"
        result_store.keep(self.out, row, shown.report, text)
        return row


def _points(row: GradedHandIn) -> int:
    return row.report["score"] + row.report.get("bonus", 0)


def _what_decides_on_points(tests: Sequence[str]) -> Iterator[bytes]:
    """The graders, and what they read of the course: a change of it makes every submission be graded again."""
    yield repr(list(tests)).encode()
    folders = {Path(test.split("::")[0]).parent.as_posix() for test in tests}  # with what test files share
    yield repr(_without_texts(tomllib.loads((ROOT / "course.toml").read_text(encoding="utf-8")))).encode()
    for file in files_matching(ROOT, [*GRADERS, *(f"{folder}/*.py" for folder in folders)]):
        yield (ROOT / file).read_bytes()


def _without_texts(table: Any) -> Any:
    """The course's table without what decides on no point: a better hint makes nobody be graded again."""
    if isinstance(table, dict):
        return {key: _without_texts(value) for key, value in table.items() if key not in TEXTS_OF_THE_COURSE}
    return table


def version_of_handout(clean: dict[str, bytes], course: Course) -> str:
    """The version of the handout that has these files of a clean tree."""
    files = {name: content for name, content in clean.items() if course.may_student_change(name)}
    return version_of({name: code_digest(renamed(content, course)) for name, content in files.items()})


def collect(scratch: Path, files: Sequence[str]) -> Tests:
    """Every graded test of these files, as a report has it before it is run.

    Raises:
        InputError: the graders themselves cannot be loaded.
    """
    path = scratch / "catalogue.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "--report", str(path)]
    command += [] if probe()["network"] else ["--no-network"]
    process = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    if process.returncode or not path.exists():
        raise InputError(f"the graders cannot be loaded: {process.stdout[-500:]}{process.stderr[-500:]}")
    return json.loads(path.read_text(encoding="utf-8"))["tests"]


def not_graded_here(tests: Tests) -> list[str]:
    """A line for each test that this machine cannot grade, for the instructor."""
    lost = [test for test in tests if test["status"] == NOT_GRADED_HERE]
    return [f"{NOT_GRADED_HERE}: {test['id']} ({test['region']}, points: {test['max_points']})" for test in lost]


def versions() -> dict[str, object]:
    """What the points may depend on."""
    of_packages = {package: metadata.version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **of_packages, "system": platform.system(), "cpus": os.cpu_count()}
