"""Switches off, one by one, what keeps hand-ins of a class from each other: see staff/proofs/undefended.py."""

import contextlib
import functools
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.errors import InputError
from staff.grade import gradebook, hand_ins, own_texts, result_store, submissions, texts, unpack, whole_class
from staff.grade.submissions import Submission


def switch_off(names: Iterable[str]) -> None:
    """In the process of staff.grade, before it begins; names of walls are for the sandbox."""
    walls = []
    _same_process()
    for name in names:
        if name in SWITCHES:
            SWITCHES[name]()
        else:
            walls.append(name)
    _put(hand_ins, "run_graded", functools.partial(hand_ins.run_graded, off=walls))


def _put(owner: object, name: str, value: object) -> None:
    setattr(owner, name, value)


def _same_process() -> None:
    """What reads a hand-in runs here, where it can be changed."""

    def here(step: Callable[..., Any], *arguments: object, seconds: float) -> Any:
        return step(*arguments)

    for module in (whole_class, hand_ins):
        _put(module, "run_apart", here)


def _one_folder() -> None:
    """Results of hand-ins lie beside the files of the class."""
    _put(result_store, "HAND_INS", ".")


def _names_as_cleaned() -> None:
    def name_all(paths: Iterable[Path]) -> list[Submission]:
        paths = list(paths)
        names = [submissions._clean(path.stem if path.suffix == ".zip" else path.name) for path in paths]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{twice[0]!r} twice")
        return [Submission(name, path) for name, path in zip(names, paths, strict=True)]

    _put(whole_class, "name_all", name_all)


def _long_names() -> None:
    """Names of any length, and the system's whole message."""
    _put(unpack, "LONGEST_PART", 1 << 20)
    _put(unpack, "BROKEN", (zipfile.BadZipFile,))
    _put(own_texts, "reason", str)


def _any_processor() -> None:
    _put(whole_class, "processors_of_jobs", lambda processors, jobs: [set(processors)] * jobs)


def _texts_of_any_length() -> None:
    for name in ("notes", "cell"):
        _put(texts, name, lambda text: text)
    _put(gradebook, "cell", str)


def _what_is_told_may_end_the_run() -> None:
    sys.stdout.reconfigure(errors="strict")  # type: ignore[union-attr]
    _put(whole_class, "contextlib", SimpleNamespace(suppress=lambda *_: contextlib.nullcontext()))


SWITCHES: dict[str, Callable[[], None]] = {
    "hand_ins": _one_folder,
    "names": _names_as_cleaned,
    "long_names": _long_names,
    "processors": _any_processor,
    "texts": _texts_of_any_length,
    "terminal": _what_is_told_may_end_the_run,
}
