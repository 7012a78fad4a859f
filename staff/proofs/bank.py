"""The banks of mistakes and variants: reads them, and puts one entry into a copy of the tree.

How an entry is written is told in staff/banks/mistakes/README.md.
"""

import ast
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.paths import ROOT
from course.table import files_matching
from staff.handout.regions import patch_in_tree, replace_in_tree

BANKS = ROOT / "staff" / "banks"
KINDS = ("mistakes", "variants")
# What the graders look for in a tree.
GRADED = ("course.toml", "common/**/*.py", "task*/*.py", "pipeline/*.py", "beyond/*.py")


@dataclass(frozen=True)
class Entry:
    """One mistake or variant: new bodies by region (and part: "2a.2/1"), and a patch of what lies outside regions.

    `fails` says which tests a mistake must fail, and which words the message of each must hold. `race`: what a thread
    finds depends on which one comes first, so that beyond `fails` its messages may differ from run to run.
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
    return [
        _entry(kind, path.stem, name, row, table)
        for kind in KINDS
        for path in sorted((folder / kind).glob("*.toml"))
        for table in [_read(path)]
        for name, row in table.items()
        if isinstance(row, dict)
    ]


def _read(path: Path) -> dict[str, Any]:
    where = f"{path.parent.name}/{path.name}"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{where}: expected a bank as TOML, got {error}") from error
    if missing := {"task", "file"} - set(table):
        raise InputError(f"{where}: expected task and file at the top, got no {min(missing)}")
    return table


def _entry(kind: str, bank: str, name: str, row: dict[str, Any], table: dict[str, Any]) -> Entry:
    where = f"{kind}/{bank}.toml: {name!r}"
    known = {"body", "patch", "file"} | ({"fails", "race"} if kind == "mistakes" else set())
    if unknown := set(row) - known:
        raise InputError(f"{where}: unknown key {min(unknown)!r}; expected some of {', '.join(sorted(known))}")
    if not row.get("body") and not row.get("patch"):
        raise InputError(f"{where}: expected a body or a patch, got neither")
    if kind == "mistakes" and not row.get("fails"):
        raise InputError(f"{where}: expected the tests that must fail, fails.test_name = [words], got none")
    fails = {test: (words,) if isinstance(words, str) else tuple(words) for test, words in row.get("fails", {}).items()}
    file, bodies, race = row.get("file", table["file"]), row.get("body", {}), row.get("race", False)
    if not isinstance(race, bool):
        raise InputError(f"{where}: race: expected true or false, got {race!r}")
    return Entry(kind, bank, name, table["task"], file, bodies, row.get("patch", ""), fails, race)


def copy_tree(tree: Path) -> None:
    """Copy what the graders look for. Real copies: through a link a script would find the source's `common`."""
    for file in files_matching(ROOT, GRADED):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tree / file)


def apply(entry: Entry, tree: Path) -> None:
    """Put an entry into a copied tree.

    Raises:
        InputError: a region that is not there, a patch that does not fit exactly once, code that does not parse, or
            that differs from the solution in its comments only.
    """
    path = tree / entry.file
    try:
        before = ast.dump(ast.parse(path.read_text(encoding="utf-8")))
        for old, new in hunks(entry.patch):
            patch_in_tree(tree, entry.file, old, new)
        for place, body in entry.bodies.items():
            region, _, part = place.partition("/")
            replace_in_tree(tree, entry.file, region, body.strip("\n"), int(part) if part else None)
        after = ast.dump(ast.parse(path.read_text(encoding="utf-8")))
    except (InputError, OSError, SyntaxError) as error:
        raise InputError(f"{entry}: {error}") from error
    if after == before:
        raise InputError(f"{entry}: the entry equals the solution; change it")


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
