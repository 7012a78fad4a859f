"""The banks of mistakes and variants: reads them, and puts entries into the solved files.

How an entry is written is told in staff/banks/mistakes/README.md.
"""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from common.errors import InputError, reading
from common.paths import ROOT
from course.table import files_matching, load_course
from staff.grade.submissions import clean_files, tree_patterns, write_files
from staff.handout.regions import for_students, replace_body

BANKS = ROOT / "staff" / "banks"
MISTAKES, VARIANTS, FILE = "mistakes", "variants", "file"  # kinds of a bank; FILE: one that is not in BANKS
KEYS = {"body": dict, "patch": str, "file": str, "fails": dict, "race": bool}
IN_WORDS = {dict: "a table of texts", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class BankEntry:
    """One mistake or variant: new bodies by region (and part: "2a.2/1"), and a patch of what lies outside regions.

    fails: test that a mistake must fail -> words that its message must hold. race: threads race in this mistake, so
    apart from `fails` its messages may differ from run to run. error: why this is no valid entry; only
    where the bank is not in BANKS.
    """

    kind: str
    bank: str
    name: str
    task: str
    file: str
    bodies: dict[str, str] = field(default_factory=dict)
    patch: str = ""
    fails: dict[str, tuple[str, ...]] = field(default_factory=dict)
    race: bool = False
    error: str = ""

    @property
    def is_mistake(self) -> bool:
        return self.kind == MISTAKES

    def __str__(self) -> str:
        return f"{self.kind}/{self.bank}: {self.name}"


def load_bank(folder: Path = BANKS) -> list[BankEntry]:
    """All entries, the mistakes first.

    Raises:
        InputError: what is no entry, with its file and name.
    """
    paths = [(kind, path) for kind in (MISTAKES, VARIANTS) for path in sorted((folder / kind).glob("*.toml"))]
    entries = [entry for kind, path in paths for entry in _entries(kind, path)]
    if wrong := next((entry for entry in entries if entry.error), None):
        raise InputError(f"{wrong}: {wrong.error}")
    return entries


def load_file(path: Path) -> list[BankEntry]:
    """The entries of a bank that lies anywhere, `fails` or not; one that is none says so in its `error`.

    Raises:
        InputError: no bank at all, or one without entries.
    """
    with reading(path):
        entries = list(_entries(FILE, path))
    if not entries:
        raise InputError(f"{path}: expected at least one entry, got none")
    return entries


def _entries(kind: str, path: Path) -> Iterator[BankEntry]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: expected a bank as TOML, got {error}") from error
    if missing := [key for key in ("task", "file") if not isinstance(table.get(key), str)]:
        raise InputError(f"{path}: expected task and file at the top, got no {missing[-1]}")
    task, file = table.pop("task"), table.pop("file")
    tasks = load_course().tasks
    for name, row in table.items():
        try:
            if task not in tasks:
                raise InputError(f"expected a task, one of {', '.join(tasks)}; got {task!r}")
            yield _entry(BankEntry(kind, path.stem, name, task, file), row)
        except InputError as error:
            yield BankEntry(kind, path.stem, name, task, file, error=str(error))


def _entry(start: BankEntry, row: object) -> BankEntry:
    """The entry that a row of the file describes. Raises InputError if it is none."""
    if not isinstance(row, dict) or not (row.get("body") or row.get("patch")):
        raise InputError(f"expected a body or a patch, got {row!r}")
    for key, value in row.items():
        if key not in KEYS or (start.kind == VARIANTS and key in ("fails", "race")):
            raise InputError(f"unknown key {key!r}; expected some of {', '.join(KEYS)}, the last two in mistakes only")
        if not isinstance(value, KEYS[key]):
            raise InputError(f"{key}: expected {IN_WORDS[KEYS[key]]}, got {value!r}")
    bodies = row.get("body", {})
    fails = {test: tuple(w if isinstance(w, list) else [w]) for test, w in row.get("fails", {}).items()}
    for text in chain(bodies.values(), *fails.values()):
        if not isinstance(text, str):
            raise InputError(f"expected texts in body and fails, got {text!r}")
    if start.kind == MISTAKES and not fails:
        raise InputError("expected the tests that must fail, fails.test_name = [words], got none")
    file, patch, race = row.get("file", start.file), row.get("patch", ""), row.get("race", False)
    return replace(start, file=file, bodies=bodies, patch=patch, fails=fails, race=race)


def copy_tree(tree: Path) -> None:
    """Copy what the graders look for. Real copies: through a link a script would find the source's `common`."""
    write_files({file: (ROOT / file).read_bytes() for file in files_matching(ROOT, tree_patterns(load_course()))}, tree)


@functools.cache
def solved_files() -> dict[str, bytes]:
    """What the graders look for in a tree, as a student would have written it who has solved every region."""
    return clean_files(solved=load_course().regions)


def changed_files(entry: BankEntry) -> dict[str, bytes]:
    """The solved files with this entry in its file.

    Raises:
        InputError: as `apply`, and an entry whose file is none of these.
    """
    if entry.file not in solved_files():
        raise InputError(f"{entry}: {entry.file}: expected a file of the course, got none; check the path")
    course, text = load_course(), apply(entry, (ROOT / entry.file).read_text(encoding="utf-8"))
    return solved_files() | {entry.file: for_students(text.encode(), entry.file, course, course.regions)}


def apply(entry: BankEntry, solved: str) -> str:
    """Put an entry into the solved text of its file.

    Raises:
        InputError: a region that is not there, a patch that does not fit exactly once, code that does not parse, or
            that differs from the solution in its comments only.
    """
    text = solved
    try:
        for old, new in _hunks(entry.patch):
            if text.count(old) != 1:
                start = old.strip().split("\n")[0]
                raise InputError(f"the patch text {start!r} must occur exactly once, got {text.count(old)} times")
            text = text.replace(old, new)
        for place, body in entry.bodies.items():
            region, _, part = place.partition("/")
            text = replace_body(text, entry.file, region, body.strip("\n"), int(part) if part else None)
        if ast.dump(ast.parse(text)) == ast.dump(ast.parse(solved)):
            raise InputError("the entry equals the solution; change it")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{entry}: {error}") from error
    return text


def _hunks(patch: str) -> Iterator[tuple[str, str]]:
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
