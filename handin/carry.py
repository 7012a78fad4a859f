"""Copies a student's lines for a TODO from its home file into the later scripts that contain the same TODO.

Lines belong to a TODO if they are between its TODO line and its END TODO line (see course/todo.py). What a student
has already written in a later file stays there, unless `force` is set; then the old file is kept next to it.
"""

import ast
import difflib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import InputError
from common.paths import atomic_write
from course.table import Course, Task
from course.todo import Block, find_blocks, replace_block

FIRST_STEPS = "cluster"  # its small programs join the workers, too
NOT_YET = "nothing to carry yet"


@dataclass(frozen=True)
class Script:
    """A student's file in memory, always with \\n between lines."""

    path: Path
    name: str  # relative to the tree, as messages show it
    text: str
    newline: str

    @property
    def blocks(self) -> list[Block]:
        return find_blocks(self.text, self.name)

    def parts(self, region: str) -> list[Block]:
        return [block for block in self.blocks if block.id == region]


def read_script(tree: Path, name: str) -> Script:
    """Raises InputError if the file is missing, is not valid UTF-8 or Python, or has lost a TODO or END TODO line."""
    try:
        text = (tree / name).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{name}: expected a Python file in UTF-8, got {error}; put it back from the student version"
        ) from None
    newline = "\r\n" if "\r\n" in text else "\n"
    script = Script(tree / name, name, text.replace("\r\n", "\n"), newline)
    find_blocks(script.text, name)  # ends here if they cannot be found
    return script


def carry(tree: Path, course: Course, into: Iterable[str] = (), force: bool = False) -> Iterator[str]:
    """Carry every recurring TODO; yields a line for each, and for each file that cannot be read.

    into: names of tasks, in any of the forms find_task takes; none means all.
    """
    folders = [find_task(course, name).folder for name in into]
    folders = folders or [FIRST_STEPS, *(task.folder for task in course.tasks.values())]
    for path in (path for folder in folders for path in sorted((tree / folder).glob("*.py"))):
        try:
            script = read_script(tree, path.relative_to(tree).as_posix())
        except InputError as error:
            yield f"not touched: {error}"
            continue
        yield from _carry_into(script, tree, course, force)


def summary(messages: Iterable[str]) -> list[str]:
    """The lines of `carry`, with all TODOs that are not solved yet in one line at the end."""
    lines = list(messages)
    opened = [line for line in lines if NOT_YET in line]
    regions = dict.fromkeys(line.split(" ")[0] for line in opened)
    rest = [line for line in lines if line not in opened]
    if opened:
        rest.append(f"not written yet, so there is nothing to carry: {', '.join(regions)}")
    return rest


def find_task(course: Course, name: str) -> Task:
    """The task called 2a, task2a or task2a_gather_scatter; the pipeline is called p or pipeline."""
    for task in course.tasks.values():
        if name.rstrip("/") in (task.id, task.marker, task.folder, task.submitted_as):
            return task
    known = ", ".join(task.submitted_as for task in course.tasks.values())
    raise InputError(f"expected a task, one of {known}; got {name!r}")


def _carry_into(script: Script, tree: Path, course: Course, force: bool) -> Iterator[str]:
    before = script
    for block in before.blocks:
        row = course.regions.get(block.id)
        if row is None or row.file == script.name:
            continue
        several = len(before.parts(block.id)) > 1
        what = f"{block.id}{f' part {block.part}' if several else ''} -> {script.name}"
        try:
            home = read_script(tree, row.file)
        except InputError as error:
            yield f"{what}: not carried, because the file in which the region first appears cannot be read: {error}"
            continue
        script, message = _carry_block(script, home, block, force)
        yield f"{what}: {message}"
    if script.text != before.text:
        pairs = zip(before.blocks, script.blocks, strict=True)
        if any(old.attempted and old.body != new.body for old, new in pairs):  # the student's own lines
            yield f"{script.name}: the previous version is kept as {_keep_copy(before.path).name}"
        _write(script)


def _carry_block(script: Script, home: Script, block: Block, force: bool) -> tuple[Script, str]:
    """The script with this block carried, if it is to be, and what was done in one line (and a diff where forced)."""
    sources = home.parts(block.id)
    if len(sources) != len(script.parts(block.id)):
        parts = f"{len(sources)} part{'s' if len(sources) != 1 else ''} of this TODO"
        return script, f"not carried, {home.name} has {parts}, this file has {len(script.parts(block.id))}"
    source = sources[block.part - 1]
    if not source.attempted:
        return script, f"{NOT_YET}, {home.name} line {source.line} is not solved"
    if source.body.strip("\n") == block.body.strip("\n"):
        return script, "already there"
    if block.attempted and not force:
        reason = f"kept what you wrote at line {block.line}; it differs from {home.name}"
        return script, f"{reason}; use --force to replace it"
    place = script.parts(block.id)[block.part - 1]  # lines have moved if blocks above were carried
    changed = replace(script, text=replace_block(script.text, place, source.body))
    if problem := _does_not_compile(changed):
        return script, f"not carried, the lines in {home.name} are not valid Python yet ({problem})"
    lines = len(source.body.strip("\n").split("\n"))
    message = f"carried {lines} line{'s' if lines > 1 else ''} from {home.name}"
    if missing := _names_left_behind(source, home, changed):
        message += f"; they use {', '.join(missing)}, which this file does not have: copy it by hand"
    if block.attempted:
        message += "\n" + _difference(block, source, script.name, home.name)
    return changed, message


def _does_not_compile(script: Script) -> str:
    try:
        compile(script.text, script.name, "exec")
    except (SyntaxError, ValueError) as error:
        return str(error)
    return ""


def _names_left_behind(source: Block, home: Script, target: Script) -> list[str]:
    """Imports and functions at the top of the home file that the lines use and the later file lacks."""
    used = {node.id for node in ast.walk(ast.parse(source.body)) if isinstance(node, ast.Name)}
    return sorted(used & _top_names(home.text) - _top_names(target.text))


def _top_names(text: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _difference(old: Block, new: Block, old_name: str, new_name: str) -> str:
    lines = difflib.unified_diff(old.body.split("\n"), new.body.split("\n"), old_name, new_name, lineterm="")
    return "\n".join(f"    {line}" for line in lines)


def _keep_copy(path: Path) -> Path:
    """A copy under a name that is free: run_glue.py.orig, then run_glue.py.orig2, ..."""
    number = 1
    while (copy := path.with_name(f"{path.name}.orig{number if number > 1 else ''}")).exists():
        number += 1
    shutil.copy2(path, copy)
    return copy


def _write(script: Script) -> None:
    mode = script.path.stat().st_mode
    with atomic_write(script.path, "wb") as file:
        file.write(script.text.replace("\n", script.newline).encode())
    os.chmod(script.path, mode & 0o777)
