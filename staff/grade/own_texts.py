"""The steps of grading that read a hand-in's own names and texts, each in a process of its own: see own_process.py.

Messages of the graders can quote a hand-in, so every text is cut: see texts.py.
"""

import contextlib
import difflib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InputError
from course.next_step import written
from course.table import Course
from staff.grade import pages, texts
from staff.grade.gradebook import GradedHandIn
from staff.grade.measurements import measured
from staff.grade.submissions import choose, write_tree
from staff.grade.unpack import unpack

LARGEST_REPORT = 64 << 20  # bytes
TEXTS = ("cause", "observed", "kind", "message")  # of a test; they can quote what a hand-in printed
Tests = list[dict[str, Any]]


class Opened(NamedTuple):
    """A hand-in as it will be graded: its tree is written, or `why` says why it cannot be."""

    digest: str
    notes: list[str]
    why: str = ""
    measured: tuple[str, ...] = ()  # see staff/grade/measurements.py


def open_into(path: Path, clean: dict[str, bytes], course: Course, folder: Path, version: str) -> Opened:
    """Unpack a hand-in into folder/unpacked and write what is graded of it into folder/tree; `version` is that of
    today's handout."""
    try:
        ignored = unpack(path, folder / "unpacked")
        files, notes = choose(folder / "unpacked", course)
        os.umask(0o022)  # ranks, which may be another user's, read the tree
        write_tree(clean, files, folder / "tree")
        times = measured(folder / "unpacked")
        contents = [part for name in sorted(files) for part in (os.fsencode(name), files[name])]
        notes += older_handout(folder / "unpacked", version)
        return Opened(digest(*contents, *map(str.encode, times)), ignored + notes, measured=tuple(times))
    except Exception as error:  # whatever a hostile zip can cause
        return unreadable(reason(error))


def compared(tree: Path, course: Course, region: str, solution: str) -> str:
    """A diff from a student's lines of a region to a solution."""
    student = "\n".join(written(course, tree).get(region, ()))
    lines = difflib.unified_diff(student.splitlines(), solution.splitlines(), "yours", "a solution", lineterm="")
    return texts.message("\n".join(lines))


def older_handout(folder: Path, version: str) -> list[str]:
    """A note if `submit.py pack` made a hand-in of another handout. It is graded as it is: lines outside of regions are
    those of its own handout."""
    for path in sorted(folder.rglob("handout.json"))[:1]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if (own := str(json.loads(path.read_text(encoding="utf-8"))["version"])[:8]) != version:
                return [f"made with handout {own}, and graded as such; today's is {version} (python submit.py update)"]
    return []


def unreadable(why: str) -> Opened:
    return Opened(digest(why.encode("utf-8", "backslashreplace")), [], f"the submission cannot be read: {why}")


def reason(error: Exception) -> str:
    """One line for the student. Of an OSError only what the system says: the rest of it names our own folders."""
    words = str(error) if isinstance(error, InputError) else type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        words += f": {error.strerror}"
    return texts.clip(" ".join(words[: 4 * texts.LONGEST_NOTE].split()), texts.LONGEST_NOTE)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def empty_report(*notes: str) -> dict[str, Any]:
    """What is known of a hand-in without a report."""
    return {"tests": [], "output": {}, "flags": [], "notes": list(notes)}


def read_report(path: Path) -> dict[str, Any]:
    """Tests, output and flags of a report.json of the graders. A report that cannot be read has none.

    `notes` says what staff and student should know about it.
    """
    if not path.exists():
        return empty_report()
    if path.stat().st_size > LARGEST_REPORT:
        return empty_report(f"the graders' report is too large ({path.stat().st_size >> 20} MiB) and was not read")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return empty_report(f"the graders' report cannot be read: {type(error).__name__}")
    most = texts.MOST_RANKS
    return {
        "tests": [test | {key: texts.message(test[key]) for key in TEXTS} for test in report["tests"]],
        "output": {id: [texts.output(rank) for rank in ranks[:most]] for id, ranks in report["output"].items()},
        "flags": [texts.flag(row) for row in report.get("flags", [])[: texts.MOST_FLAGS]],
        "notes": texts.notes(report.get("warnings", [])),
    }


def student_page(report: dict[str, Any], run: dict[str, Any], course: Course) -> str:
    return pages.student_page(GradedHandIn(report, run), course)
