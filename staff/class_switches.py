"""Switches off, one by one, what keeps hand-ins of a class from each other: see staff/undefended.py."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common.errors import InputError
from staff import grade, grading, hand_in, heard, kept, pages, submissions, unpack
from staff.gradebook import Row
from staff.submissions import Submission


def switch_off(names: Iterable[str]) -> None:
    """In the process of staff.grade, before it begins; names of walls are for the sandbox."""
    walls = []
    for name in names:
        if name in SWITCHES:
            SWITCHES[name]()
        else:
            walls.append(name)
    _put(grading, "run_graded", functools.partial(grading.run_graded, off=walls))


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _one_folder() -> None:
    """Results of hand-ins lie beside the files of the class."""
    _put(kept, "HAND_INS", ".")
    _put(kept, "move_old_results", lambda out: None)


def _names_as_cleaned() -> None:
    def name_all(paths: Iterable[Path]) -> list[Submission]:
        paths = list(paths)
        names = [submissions._clean(path.stem if path.suffix == ".zip" else path.name) for path in paths]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{twice[0]!r} twice")
        return [Submission(name, path) for name, path in zip(names, paths, strict=True)]

    _put(grade, "name_all", name_all)


def _any_character() -> None:
    """Texts are written as they came."""

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def as_printed(row: Row, *rest: Any) -> str:
        return "".join(str(rank) for ranks in row.run["output"].values() for rank in (r["stdout"] for r in ranks))

    for module in (heard, pages):
        _put(module, "printable", str)
    _put(heard, "without_surrogates", str)
    _put(kept, "write", write)
    _put(hand_in.pages, "student_page", as_printed)


def _long_names() -> None:
    """Names of any length, and the system's whole message."""
    _put(unpack, "LONGEST_PART", 1 << 20)
    _put(hand_in, "reason", str)


SWITCHES: dict[str, Callable[[], None]] = {
    "hand_ins": _one_folder,
    "names": _names_as_cleaned,
    "characters": _any_character,
    "long_names": _long_names,
}
