"""Moves a student's work into a corrected handout: new files, with the lines that the student wrote for each TODO.

What the student had is kept in a folder beside this one. Files of the student's own, records of runs and caches stay
where they are.
"""

import shutil
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path, PurePosixPath

from common.errors import InputError
from common.paths import atomic_write
from course.manifest import code_digest, parse_manifest, read_manifest, version_of
from course.todo import find_blocks, replace_block
from handin.carry import read_script

MANIFEST = ".handout.json"
STAY = (".venv", ".git", "runs", "dist", "__pycache__", ".cache", ".pytest_cache", "glue_data", "oscar_data")


def read_handout(path: Path) -> dict[str, bytes]:
    """Return the files of a handout's zip. Raises InputError if it is none."""
    try:
        with zipfile.ZipFile(path) as opened:
            files = {name.partition("/")[2]: opened.read(name) for name in opened.namelist() if not name.endswith("/")}
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: expected the zip of a handout, got {error}") from None
    if MANIFEST not in files or any(".." in PurePosixPath(name).parts or name.startswith("/") for name in files):
        raise InputError(f"{path}: expected the zip of a handout, got another one; download it again")
    return files


def update(tree: Path, archive: Path) -> Iterator[str]:
    """Put the handout of `archive` into `tree`, and move the student's lines over; yields what was done.

    Raises:
        InputError: no handout, the tree is none, or a file with regions cannot be read. Nothing is changed then.
    """
    new, old = read_handout(archive), read_manifest(tree)
    if not old:
        raise InputError(f"{tree}: expected a handout, got a folder without {MANIFEST}; unpack the new handout instead")
    manifest = parse_manifest(new[MANIFEST].decode(), archive)
    versions = [version_of(one["code"]) for one in (old, manifest)]
    now = {name: sha256(content).hexdigest() for name, content in new.items() if name != MANIFEST}
    changed = [name for name, digest in now.items() if old["files"].get(name) != digest]
    moved = {name: _moved(tree, name, new[name], old) for name in changed if manifest["code"].get(name)}
    if not changed and not old["files"].keys() - new.keys():
        yield f"handout {versions[0]} is what you have; nothing is changed"
        return
    kept = _keep(tree, versions[0])
    yield f"handout {versions[0]} -> {versions[1]}; what you had is in {kept}"
    for name in changed:
        text, lines = moved.get(name, (new[name], []))
        mine = not lines and (tree / name).exists() and _digest(tree / name) != old["files"].get(name)
        what = "replaced, yours is the kept one" if mine else "changed" if name in old["files"] else "new"
        yield f"{name}: {what}"
        _write(tree / name, text)
        yield from (f"    {line}" for line in lines)
    for name in sorted(old["files"].keys() - new.keys()):
        if _digest(tree / name) == old["files"][name]:
            (tree / name).unlink()
            yield f"{name}: removed"
    _write(tree / MANIFEST, new[MANIFEST])


def _moved(tree: Path, name: str, new: bytes, old: dict) -> tuple[bytes, list[str]]:
    """The new file with the student's lines in it, and what the student should know."""
    if not (tree / name).exists():
        return new, []
    mine = read_script(tree, name)
    bodies = {(block.id, block.part): block for block in find_blocks(mine, name) if block.attempted}
    text, lines = new.decode(), []
    for key, block in bodies.items():
        place = next((one for one in find_blocks(text, name) if (one.id, one.part) == key), None)
        if place is None:
            lines.append(f"{block.id} is no region of this file any more: your lines are in the kept one")
        else:
            text = replace_block(text, place, block.body)
    same_steps = _todo_lines(mine, name) == _todo_lines(new.decode(), name)  # else what was given out is not known
    if same_steps and _outside(mine, new.decode(), name) != old["code"].get(name):
        lines.append("you also changed lines outside of regions: copy them from the kept file")
    if bodies:
        lines.append(f"your lines of {', '.join(dict.fromkeys(id for id, _ in bodies))} are in it")
    return text.encode(), lines


def _todo_lines(text: str, name: str) -> list[str]:
    return [text.split("\n")[block.line - 1].strip() for block in find_blocks(text, name)]


def _outside(mine: str, new: str, name: str) -> str:
    """The digest of a student's file as it was given out: its regions open as in the new handout."""
    given = {(block.id, block.part): block.body for block in find_blocks(new, name)}
    for key in [(block.id, block.part) for block in find_blocks(mine, name)]:
        place = next(one for one in find_blocks(mine, name) if (one.id, one.part) == key)
        mine = replace_block(mine, place, given.get(key, place.body))
    return code_digest(mine.encode())


def _keep(tree: Path, version: str) -> Path:
    """A copy of the tree beside it, without what is large and stays."""
    names = (tree.with_name(f"{tree.name}-{version}{number or ''}") for number in range(1000))
    kept = next(name for name in names if not name.exists())
    shutil.copytree(tree, kept, symlinks=True, ignore=shutil.ignore_patterns(*STAY))
    return kept


def _digest(path: Path) -> str:
    return sha256(content).hexdigest() if (content := _bytes(path)) is not None else ""


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write(path: Path, content: bytes) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o755 if content.startswith(b"#!") else 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "wb") as file:
        file.write(content)
    path.chmod(mode)
