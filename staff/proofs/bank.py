"""The banks of mistakes and variants: reads them, and puts entries into the solved files.

How an entry is written is told in staff/banks/mistakes/README.md.
"""

import ast
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InputError, reading
from common.paths import ROOT
from course.table import Course, files_matching, load_course
from staff.grade.submissions import TREE, clean_files, write_files
from staff.handout.regions import for_students, replace_body

BANKS = ROOT / "staff" / "banks"
KINDS = ("mistakes", "variants")


@dataclass(frozen=True)
class Entry:
    """One mistake or variant: new bodies by region (and part: "2a.2/1"), and a patch of what lies outside regions.

    `fails` says which tests a mistake must fail, and which words the message of each must hold. `race`: what a thread
    finds depends on which one comes first, so that beyond `fails` its messages may differ from run to run. An entry of
    a file from elsewhere is of the kind "file"; `error` says why it is none.
    """

    kind: str
    bank: str
    name: str
    task: str
    file: str
    bodies: dict[str, str]
    patch: str = ""
    fails: dict[str, tuple[str, ...]] = field(default_factory=dict)
    race: bool = False
    error: str = ""

    @property
    def is_mistake(self) -> bool:
        return self.kind == "mistakes"

    def __str__(self) -> str:
        return f"{self.kind}/{self.bank}: {self.name}"


def load_bank(folder: Path = BANKS) -> list[Entry]:
    """All entries, the mistakes first.

    Raises:
        InputError: what is no entry, with its file and name.
    """
    files = [(kind, path) for kind in KINDS for path in sorted((folder / kind).glob("*.toml"))]
    course = load_course()
    entries = [entry for kind, path in files for entry in _entries(kind, path, f"{kind}/{path.name}", course)]
    if wrong := next((entry for entry in entries if entry.error), None):
        raise InputError(wrong.error)
    return entries


def load_file(path: Path) -> list[Entry]:
    """The entries of a bank that lies anywhere, `fails` or not; one that is none says so in its `error`.

    Raises:
        InputError: no bank at all, or one without entries.
    """
    with reading(path):
        entries = list(_entries("file", path, str(path), load_course()))
    if not entries:
        raise InputError(f"{path}: expected at least one entry, got none")
    return entries


def _entries(kind: str, path: Path, where: str, course: Course) -> Iterator[Entry]:
    """Yield the entries of a file; one that is none says so in its `error`."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{where}: expected a bank as TOML, got {error}") from error
    if missing := [key for key in ("task", "file") if not isinstance(table.get(key), str)]:
        raise InputError(f"{where}: expected task and file at the top, got no {missing[-1]}")
    task, file = table.pop("task"), table.pop("file")
    for name, row in table.items():
        try:
            if task not in course.tasks:
                raise InputError(f"{where}: expected a task, one of {', '.join(course.tasks)}; got {task!r}")
            yield _entry(kind, path.stem, name, row, task, file)
        except InputError as error:
            yield Entry(kind, path.stem, name, task, file, {}, error=str(error))


def _entry(kind: str, bank: str, name: str, row: dict[str, Any], task: str, file: str) -> Entry:
    where = f"{kind}/{bank}.toml: {name!r}"
    known = {"body": dict, "patch": str, "file": str} | ({"fails": dict, "race": bool} if kind != "variants" else {})
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a table with a body or a patch, got {row!r}")
    if unknown := set(row) - set(known):
        raise InputError(f"{where}: unknown key {min(unknown)!r}; expected some of {', '.join(sorted(known))}")
    for key, value in row.items():
        if not isinstance(value, known[key]):
            words = {dict: "a table of texts", str: "a text", bool: "true or false"}[known[key]]
            raise InputError(f"{where}: {key}: expected {words}, got {value!r}")
    texts = [
        text for value in row.get("fails", {}).values() for text in (value if isinstance(value, list) else [value])
    ]
    if strange := [text for text in (*row.get("body", {}).values(), *texts) if not isinstance(text, str)]:
        raise InputError(f"{where}: expected texts in body and fails, got {strange[0]!r}")
    if not row.get("body") and not row.get("patch"):
        raise InputError(f"{where}: expected a body or a patch, got neither")
    if kind == "mistakes" and not row.get("fails"):
        raise InputError(f"{where}: expected the tests that must fail, fails.test_name = [words], got none")
    fails = {test: (words,) if isinstance(words, str) else tuple(words) for test, words in row.get("fails", {}).items()}
    bodies, race = row.get("body", {}), row.get("race", False)
    return Entry(kind, bank, name, task, row.get("file", file), bodies, row.get("patch", ""), fails, race)


def copy_tree(tree: Path) -> None:
    """Copy what the graders look for. Real copies: through a link a script would find the source's `common`."""
    write_files({file: (ROOT / file).read_bytes() for file in files_matching(ROOT, TREE)}, tree)


@functools.cache
def solved_files() -> dict[str, bytes]:
    """What the graders look for in a tree, as a student would have written it who has solved every region."""
    return clean_files(solved=load_course().regions)


def changed_files(entries: Iterable[Entry]) -> dict[str, bytes]:
    """The solved files with these entries in them, each in a file of its own.

    Raises:
        InputError: as `apply`, and an entry whose file is none of these.
    """
    course, files = load_course(), dict(solved_files())
    for entry in entries:
        if entry.file not in files:
            raise InputError(f"{entry}: {entry.file}: expected a file of the course, got none; check the path")
        text = apply(entry, (ROOT / entry.file).read_text(encoding="utf-8"))
        files[entry.file] = for_students(text.encode(), entry.file, course, course.regions)
    return files


def apply(entry: Entry, solved: str) -> str:
    """Put an entry into the solved text of its file.

    Raises:
        InputError: a region that is not there, a patch that does not fit exactly once, code that does not parse, or
            that differs from the solution in its comments only.
    """
    text = solved
    try:
        for old, new in hunks(entry.patch):
            if text.count(old) != 1:
                start = old.strip().split("\n")[0]
                raise InputError(f"the patch text {start!r} must occur exactly once, got {text.count(old)} times")
            text = text.replace(old, new)
        for place, body in entry.bodies.items():
            region, _, part = place.partition("/")
            text = replace_body(text, entry.file, region, body.strip("\n"), int(part) if part else None)
        equal = ast.dump(ast.parse(text)) == ast.dump(ast.parse(solved))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{entry}: {error}") from error
    if equal:
        raise InputError(f"{entry}: the entry equals the solution; change it")
    return text


def hunks(patch: str) -> Iterator[tuple[str, str]]:
    """(old text, new text) of each hunk. Lines of both begin with a blank, old ones with -, new ones with +.

    Raises:
        InputError: a line that begins otherwise.
    """
    for hunk in filter(None, re.split(r"^@@\n", patch, flags=re.MULTILINE)):
        lines = hunk.splitlines(keepends=True)
        if strange := next((line for line in lines if line[0] not in " -+"), None):
            raise InputError(f"expected a line of a patch to begin with a blank, - or +, got {strange.rstrip()!r}")
        old, new = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        yield old, new
