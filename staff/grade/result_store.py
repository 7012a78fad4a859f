"""Where the results of a class are kept, and how they are written: a killed run leaves nothing half-written.

    DIR/gradebook.csv, index.html         of the class
       /changes.csv                       whose points differ from those of the grading before
       /roster.csv, grades.csv            the people of the course, and their points
    DIR/hand_ins/NAME/report.json         points and messages that the student may see; written last: where it is, the
                                          hand-in is graded
                     /index.html          the student's page
                     /run.json            for staff: time, memory, notes, what to look at by hand, and `all`: the points
                                          and messages of every test, where some are hidden (hidden_tests.py)
                     /output.json         for staff: what ranks printed
                     /lower.json          for staff: the tests of a grading that gave fewer points, and does not count
                     /earlier.json        for staff: the tests of the grading before, if the hand-in was graded again

The names of hand-ins are in a folder of their own, so no hand-in can be called as a file of the class.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import InputError
from common.paths import atomic_write
from staff.grade.gradebook import GradedHandIn

PREFIX = "cos598d-grade-"
HAND_INS = "hand_ins"


def folder_of(out: Path, name: str) -> Path:
    return out / HAND_INS / name


def read(out: Path, name: str) -> GradedHandIn:
    """What was kept of a graded submission; what its ranks printed is in output.json.

    Raises:
        OSError, ValueError: it is not graded yet, or somebody has changed the files.
    """
    report, run = (_load(out, name, file) for file in ("report.json", "run.json"))
    return GradedHandIn(report | run.pop("all", {}), run | {"output": {}})


def _load(out: Path, name: str, file: str) -> dict[str, Any]:
    return json.loads((folder_of(out, name) / file).read_text(encoding="utf-8"))


def earlier(out: Path, name: str) -> dict[str, Any]:
    """The tests of the grading before the last, and the digest of what was handed in then; empty without one."""
    try:
        return _load(out, name, "earlier.json")
    except (OSError, ValueError):
        return {}


def graded(out: Path) -> list[str]:
    """The names of all hand-ins whose results are kept here, in order."""
    return sorted(path.parent.name for path in (out / HAND_INS).glob("*/report.json"))


def original_names(out: Path) -> dict[str, str]:
    """The names under which results are kept here -> the original names of the hand-ins."""
    names = {}
    for name in graded(out):
        with contextlib.suppress(OSError, ValueError, KeyError):  # somebody has changed the files
            names[name] = str(_load(out, name, "run.json")["called"])
    return names


def keep(out: Path, row: GradedHandIn, shown: dict[str, object], page: str) -> None:
    """Write the results of one submission; report.json comes last, with what is `shown` to the student."""
    folder, run = folder_of(out, row.name), dict(row.run)
    if shown.get("hidden"):
        # read() puts these over report.json, of which nothing is hidden then.
        run["all"] = {key: value for key, value in row.report.items() if shown.get(key) != value} | {"hidden": False}
    with contextlib.suppress(OSError, ValueError, KeyError):  # not graded before, or damaged
        before = read(out, row.name)
        write(folder / "earlier.json", json.dumps({"hand_in": before.run.get("hand_in"), "tests": before.tests}))
    (folder / "report.json").unlink(missing_ok=True)  # of what was handed in before: not done any more
    write(folder / "output.json", json.dumps(run["output"], indent=1))
    write(folder / "run.json", json.dumps({key: run[key] for key in run if key != "output"}, indent=1))
    write(folder / "index.html", page)
    write(folder / "report.json", json.dumps(shown, indent=1))


def keep_lower(out: Path, row: GradedHandIn) -> None:
    """Write the tests of a grading that does not count."""
    write(folder_of(out, row.name) / "lower.json", json.dumps(row.tests, indent=1))


def path_of(out: Path, name: str) -> Path | None:
    """The path of the hand-in whose results are kept under a name; None if it is not known."""
    try:
        return Path(_load(out, name, "run.json")["path"])
    except (OSError, ValueError, KeyError):
        return None


def write(path: Path, text: str) -> None:
    """Write all of it or nothing. Characters that no file can hold are written as escapes."""
    with atomic_write(path, "wb") as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def at_work(out: Path, part: str = "") -> Iterator[Path]:
    """Lock `out`, or this part of it, for this run alone; yield a scratch folder that is removed at the end.

    Several parts may work at once, but not beside a run over the whole class. What a killed run left is removed first.

    Raises:
        InputError: another staff.grade is at work here.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)  # grades are for nobody else on this machine
    with contextlib.ExitStack() as locks:
        whole = locks.enter_context(open(out / ".grading", "a+"))
        _lock(whole, fcntl.LOCK_SH if part else fcntl.LOCK_EX, out)
        lock_file = locks.enter_context(open(out / f".grading.{part}", "a+")) if part else whole
        if part:
            _lock(lock_file, fcntl.LOCK_EX, out)
        lock_file.seek(0)
        _remove_scratch(lock_file.read())
        scratch = tempfile.mkdtemp(prefix=PREFIX)
        os.chmod(scratch, 0o711)  # the sandbox's folders are in here, and their users must get to them
        try:
            lock_file.truncate(0)
            lock_file.write(scratch)
            lock_file.flush()
            yield Path(scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _lock(file: IO[str], kind: int, out: Path) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{out}: another staff.grade is using this folder; wait until it ends") from None


def _remove_scratch(name: str) -> None:
    path = Path(name)
    if path.name.startswith(PREFIX) and path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
        shutil.rmtree(path, ignore_errors=True)
