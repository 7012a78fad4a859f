"""Grades one submission after the other into DIR/NAME: report.json for machines, index.html for the student.

report.json is written last and all at once: where it stands, the submission is graded. What was noted on the way
(time, memory, notes, what ranks printed) is in run.json, so that equal submissions give equal reports.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from common.course import Course, files_matching, load_course
from common.errors import InputError
from common.paths import ROOT, atomic_write
from staff import pages
from staff.gradebook import Row
from staff.sandbox import probe, run_graded
from staff.submissions import Submission, clean_files, open_submission, printable, write_tree

DEADLINE = 600.0  # seconds for one submission; its graders have shorter ones of their own
GRADERS = ("course.toml", "common/*.py", "grader/*.py", "tests/conftest.py")  # and the tests: what decides on points
PACKAGES = ("torch", "transformers", "numpy", "pytest")
PREFIX = "cos598d-grade-"

Tests = list[dict[str, Any]]


def grader_files() -> list[str]:
    """The graders of course.toml, as far as they are there."""
    named = [file for task in load_course().tasks.values() for file in task.tests] + ["tests/test_ladder.py"]
    return [file for file in dict.fromkeys(named) if (ROOT / file).exists()]


def hidden_files() -> list[str]:
    """The graders that only the autograder runs."""
    patterns = load_course().hidden.get("tests", [])
    return [file for file in files_matching(ROOT, patterns) if Path(file).name.startswith("test_")]


@contextlib.contextmanager
def at_work(out: Path) -> Iterator[Path]:
    """Alone in `out`, with a scratch folder that is gone at the end; what a killed run has left goes first."""
    out.mkdir(mode=0o700, parents=True, exist_ok=True)  # grades are for nobody else on this machine
    with open(out / ".grading", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{out}: expected no one else at work here, got another staff.grade; wait for it"
            ) from None
        lock.seek(0)
        _remove_scratch(lock.read())
        scratch = tempfile.mkdtemp(prefix=PREFIX)
        os.chmod(scratch, 0o711)  # the sandbox's folders lie in here, and their users must get to them
        try:
            lock.truncate(0)
            lock.write(scratch)
            lock.flush()
            yield Path(scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _remove_scratch(name: str) -> None:
    path = Path(name)
    if path.name.startswith(PREFIX) and path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class Grading:
    """What the submissions of one run share. `catalogue` has every test, as one that was never reached."""

    out: Path
    scratch: Path
    course: Course
    clean: dict[str, bytes]
    files: Sequence[str]
    catalogue: Tests
    graders: str  # digest of all that decides on points
    sandbox: dict[str, Any]
    seed: int
    deadline: float

    @classmethod
    def prepare(cls, out: Path, scratch: Path, files: Sequence[str], *, seed: int, deadline: float) -> "Grading":
        """The clean tree and the list of tests, made once."""
        course = load_course()
        return cls(
            out=out,
            scratch=scratch,
            course=course,
            clean=clean_files(),
            files=files,
            catalogue=collect(scratch, files),
            graders=_digest(*_graders(files)),
            sandbox=probe(),
            seed=seed,
            deadline=deadline,
        )

    def grade(self, submission: Submission) -> bool:
        """Grade a submission unless that is done already; returns whether it was graded now.

        Whatever is wrong with the submission is in its report.
        """
        start = time.monotonic()
        folder = self.scratch / secrets.token_hex(8)  # a name that no other submission's code can guess
        folder.mkdir(mode=0o700)
        run: dict[str, Any] = {"notes": [], "unreadable": False, "peak_pss_mb": None, "output": {}}
        try:
            try:
                taken = open_submission(submission.path, folder / "unpacked", self.course)
                write_tree(self.clean, taken, folder / "tree")
                run |= {"notes": taken.notes, "digest": _digest(self.graders.encode(), taken.digest.encode())}
            except Exception as error:  # whatever a hostile zip can cause
                why = _why(error)
                run |= {"notes": [why], "unreadable": True, "digest": _digest(self.graders.encode(), why.encode())}
            if self._is_done(submission, run["digest"]):
                return False
            if run["unreadable"]:
                tests = [test | {"status": "crashed", "message": run["notes"][0]} for test in self.catalogue]
            else:
                tests = self._run(folder / "tree", folder / "report.json", run)
            run["wall_s"] = round(time.monotonic() - start, 1)
            self._keep(submission, tests, run)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def _run(self, tree: Path, report: Path, run: dict[str, Any]) -> Tests:
        """The graders on a student's tree; every test of the catalogue, in its order."""
        inside = {"TMPDIR": str(self.scratch)}  # so that nothing is left behind, even by a killed run
        outcome = run_graded(tree, report, tests=self.files, seed=self.seed, deadline_s=self.deadline, env=inside)
        told = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {"tests": [], "output": {}}
        if outcome.timed_out:
            run["notes"] = [*run["notes"], f"the graders were ended after {self.deadline:g} s, before the last test"]
        elif outcome.exit_code not in (0, 1):
            run["notes"] = [*run["notes"], f"the graders did not finish (exit code {outcome.exit_code})"]
            run["graders_said"] = printable(outcome.output[-2000:])
        run |= {"peak_pss_mb": outcome.peak_pss_mb, "swept": outcome.swept, "sandbox": outcome.sandbox}
        run["output"] = told["output"]
        seen = {test["id"]: test for test in told["tests"]}
        return [seen.get(test["id"], test) for test in self.catalogue]

    def _is_done(self, submission: Submission, digest: str) -> bool:
        try:
            return self.read(submission.name).run["digest"] == digest
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def read(self, name: str) -> Row:
        """What was kept of a graded submission."""
        folder = self.out / name
        report, run = (json.loads((folder / file).read_text(encoding="utf-8")) for file in ("report.json", "run.json"))
        return Row(report, run)

    def _keep(self, submission: Submission, tests: Tests, run: dict[str, Any]) -> None:
        folder = self.out / submission.name
        report = {
            "submission": submission.name,
            "score": sum(test["points"] for test in tests),
            "max_score": sum(test["max_points"] for test in tests),
            "tests": [test | {"message": printable(test["message"])} for test in tests],
            "environment": environment() | {"seed": self.seed},
            "sandbox": run.pop("sandbox", self.sandbox),
        }
        (folder / "report.json").unlink(missing_ok=True)  # of what was handed in before: not done any more
        _write(folder / "run.json", json.dumps(run, indent=1))
        _write(folder / "index.html", pages.student_page(Row(report, run), self.course))
        _write(folder / "report.json", json.dumps(report, indent=1))


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text)


def _graders(tests: Sequence[str]) -> Iterator[bytes]:
    """All that decides on points: a change of it makes every submission be graded again."""
    yield repr(list(tests)).encode()
    for file in files_matching(ROOT, [*GRADERS, *(test.split("::")[0] for test in tests)]):
        yield (ROOT / file).read_bytes()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _why(error: Exception) -> str:
    """One line for the student: an InputError says it itself."""
    words = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return f"the submission cannot be read: {printable(' '.join(words.split()))[:500]}"


def collect(scratch: Path, files: Sequence[str]) -> Tests:
    """Every graded test of these files, as a report has it before it is run.

    Raises:
        InputError: the graders themselves cannot be loaded.
    """
    path = scratch / "catalogue.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "--report", str(path)]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not path.exists():
        raise InputError(f"the graders cannot be loaded: {done.stdout[-500:]}{done.stderr[-500:]}")
    return json.loads(path.read_text(encoding="utf-8"))["tests"]


def environment() -> dict[str, Any]:
    """What the points may depend on."""
    versions = {package: metadata.version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **versions, "system": platform.system(), "cpus": os.cpu_count()}
