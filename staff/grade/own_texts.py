"""The steps of grading that read a hand-in's own names and texts, each in a process of its own: see own_process.py."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InputError
from course.table import Course
from staff.grade import pages
from staff.grade.gradebook import Row
from staff.grade.measurements import measured
from staff.grade.submissions import open_submission, write_tree
from staff.grade.texts import LONGEST_NOTE, clip


class Opened(NamedTuple):
    """A hand-in as it will be graded: its tree is written, or `why` says why it cannot be."""

    digest: str
    notes: list[str]
    why: str = ""
    measured: tuple[str, ...] = ()  # see staff/grade/measurements.py


def open_into(path: Path, clean: dict[str, bytes], course: Course, folder: Path) -> Opened:
    """Unpack a hand-in into folder/unpacked and write what is graded of it into folder/tree."""
    try:
        taken = open_submission(path, folder / "unpacked", course)
        write_tree(clean, taken, folder / "tree")
        times = measured(folder / "unpacked")
        combined_digest = digest(taken.digest.encode(), "\n".join(times).encode())
        return Opened(combined_digest, taken.notes, measured=tuple(times))
    except Exception as error:  # whatever a hostile zip can cause
        return unreadable(reason(error))


def unreadable(why: str) -> Opened:
    return Opened(digest(why.encode("utf-8", "backslashreplace")), [], f"the submission cannot be read: {why}")


def reason(error: Exception) -> str:
    """One line for the student. Of an OSError only what the system says: the rest of it names our own folders."""
    words = str(error) if isinstance(error, InputError) else type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        words += f": {error.strerror}"
    return clip(" ".join(words[: 4 * LONGEST_NOTE].split()), LONGEST_NOTE)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def page(report: dict[str, Any], run: dict[str, Any], course: Course) -> str:
    return pages.student_page(Row(report, run), course)
