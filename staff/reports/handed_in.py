"""A hand-in as a person grades it: its report, answers, code, and the records of its runs."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import InputError
from course.table import Course
from handin.own_figures import OwnFigure, own_figures
from handin.own_run_questions import OwnRunQuestion, Subject
from handin.quiz import FILE, check
from handin.records import DAMAGED, Runs, find_runs
from handin.words import read_words
from staff.grade.submissions import choose, name_all
from staff.grade.unpack import unpack

LARGEST_REPORT = 1_000_000  # bytes; with all code in its appendix, a report has a tenth of it


@dataclass(frozen=True)
class HandedIn:
    """One hand-in. `code` has our names of the files; `problems` says what could not be read."""

    name: str
    path: Path
    report: str
    answers: dict[str, str]
    code: dict[str, bytes]
    runs: Runs
    figures: dict[str, OwnFigure]
    asked: str  # questions.json, as it is
    problems: list[str]

    @property
    def subject(self) -> Subject:
        """What questions on own runs are about."""
        return Subject({name: text.decode(errors="replace") for name, text in self.code.items()}, self.runs)

    def answered_at_home(self) -> list[tuple[OwnRunQuestion, str, bool]]:
        """Return what `submit.py questions` asked, the answers, and whether each is right by the records."""
        try:
            return check(self.subject, self.asked) if self.asked else []
        except DAMAGED:
            return []

    def own_run_points(self, course: Course) -> float:
        """Return the share of the course's points for these questions that was answered right."""
        answers = self.answered_at_home()
        return round(course.own_run_points * sum(right for *_, right in answers) / max(1, len(answers)), 1)


@contextlib.contextmanager
def unpacked(paths: Sequence[Path], course: Course) -> Iterator[list[HandedIn]]:
    """Unpack folders and archives, and read them; their files are there until the block ends."""
    with TemporaryDirectory() as scratch:
        submissions = name_all(paths)
        yield [_read(of.name, of.path, Path(scratch, str(i)), course) for i, of in enumerate(submissions)]


def _read(name: str, path: Path, folder: Path, course: Course) -> HandedIn:
    problems: list[str] = []
    report, answers, code = "", {}, {}
    try:
        unpack(path, folder)
        code = choose(folder, course)[0]
    except InputError as error:
        problems.append(str(error))
    found = min(folder.rglob("report.md"), key=lambda file: len(file.parts), default=None)
    # Packed, the report is beside the runs; in a student's own folder it is in report/.
    base = folder if found is None else found.parent if (found.parent / "runs").is_dir() else found.parent.parent
    if found is None:
        problems.append("no report.md in it")
    elif found.stat().st_size > LARGEST_REPORT:
        problems.append(f"report.md has more than {LARGEST_REPORT:,} bytes and was not read")
    else:
        report = found.read_text(encoding="utf-8", errors="replace")
        try:
            answers = {key: text.strip() for key, text in read_words(report, "report.md").items()}
        except InputError as error:
            problems.append(str(error))
    runs = find_runs(base / "runs", base / "submit_figures")
    asked = next((path.read_text("utf-8", "replace") for path in sorted(folder.rglob(FILE))), "")
    return HandedIn(name, path, report, answers, code, runs, own_figures(runs), asked, problems)
