"""Copies a student's lines for a TODO from its home file into the later scripts that contain the same TODO.

Lines belong to a TODO if they are between its TODO line and its END TODO line (see course/todo.py). What a student
has already written in a later file stays there, unless `force` is set; then the old file is kept next to it.
"""

import ast
import difflib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import InputError
from common.paths import atomic_write
from course.table import Course, Task
from course.todo import Block, find_blocks, replace_block

FIRST_STEPS = "cluster"  # its small programs join the workers, too
NOT_YET = "nothing to carry yet"


def carry(tree: Path, course: Course, into: Iterable[str] = (), force: bool = False) -> Iterator[str]:
    """Carry every recurring TODO; yields a line for each, and for each file that cannot be read.

    into: names of tasks, in any of the forms find_task takes; none means all.
    """
    folders = [find_task(course, name).folder for name in into]
    folders = folders or [FIRST_STEPS, *(task.folder for task in course.tasks.values())]
    for path in (path for folder in folders for path in sorted((tree / folder).glob("*.py"))):
        name = path.relative_to(tree).as_posix()
        try:
            text = read_script(tree, name)
        except InputError as error:
            yield f"not touched: {error}"
        else:
            yield from _carry_into(tree, course, name, text, force)


def summary(messages: Iterable[str]) -> list[str]:
    """The lines of `carry`, with all TODOs that are not solved yet in one line at the end."""
    lines = list(messages)
    regions = dict.fromkeys(line.split(" ")[0] for line in lines if NOT_YET in line)
    last = [f"not written yet, so there is nothing to carry: {', '.join(regions)}"] if regions else []
    return [line for line in lines if NOT_YET not in line] + last


def find_task(course: Course, name: str) -> Task:
    """The task called 2a, task2a or task2a_gather_scatter; the pipeline is called p or pipeline."""
    for task in course.tasks.values():
        if name.rstrip("/") in (task.id, task.marker, task.folder, task.submitted_as):
            return task
    known = ", ".join(task.submitted_as for task in course.tasks.values())
    raise InputError(f"expected a task, one of {known}; got {name!r}")


def read_script(tree: Path, name: str) -> str:
    """Return a file with \\n between its lines. Raises InputError, also if it is not Python or has lost a TODO line."""
    try:
        text = (tree / name).read_bytes().decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        advice = "put it back from the student version"
        raise InputError(f"{name}: expected a Python file in UTF-8, got {error}; {advice}") from None
    find_blocks(text, name)
    return text


def _carry_into(tree: Path, course: Course, name: str, before: str, force: bool) -> Iterator[str]:
    text, blocks, has_lost_lines = before, find_blocks(before, name), False
    for number, block in enumerate(blocks):
        row = course.regions.get(block.id)
        if row is None or row.file == name:
            continue
        parts = sum(other.id == block.id for other in blocks)
        what = f"{block.id}{f' part {block.part}' if parts > 1 else ''} -> {name}"
        try:
            home = read_script(tree, row.file)
        except InputError as error:
            yield f"{what}: not carried, because the file in which the region first appears cannot be read: {error}"
            continue
        sources = [other for other in find_blocks(home, row.file) if other.id == block.id]
        if len(sources) != parts:
            yield f"{what}: not carried, the number of parts differs: {len(sources)} in {row.file}, {parts} here"
            continue
        source = sources[block.part - 1]
        if not source.attempted:
            yield f"{what}: {NOT_YET}, {row.file} line {source.line} is not solved"
        elif source.body.strip("\n") == block.body.strip("\n"):
            yield f"{what}: already there"
        elif block.attempted and not force:
            kept = f"kept what you wrote at line {block.line}; it differs from {row.file}"
            yield f"{what}: {kept}; use --force to replace it"
        else:
            place = find_blocks(text, name)[number]  # its lines have moved if blocks above were carried
            changed = replace_block(text, place, source.body)
            try:
                compile(changed, name, "exec")
            except (SyntaxError, ValueError) as error:
                yield f"{what}: not carried, the lines in {row.file} are not valid Python yet ({error})"
                continue
            text, has_lost_lines = changed, has_lost_lines or block.attempted
            yield f"{what}: {_carried(source, home, row.file, changed)}"
            if block.attempted:
                yield _difference(block, source, name, row.file)
    if has_lost_lines:
        yield f"{name}: the previous version is kept as {_keep_copy(tree / name).name}"
    if text != before:
        _write(tree / name, text)


def _carried(source: Block, home: str, home_name: str, target: str) -> str:
    """Return what was carried, and which imports and functions of the home file the later file lacks."""
    lines = source.body.strip("\n").count("\n") + 1
    used = {node.id for node in ast.walk(ast.parse(source.body)) if isinstance(node, ast.Name)}
    missing = sorted(used & _top_names(home) - _top_names(target))
    hint = f"; they use {', '.join(missing)}, which this file does not have: copy it by hand" if missing else ""
    return f"carried {lines} line{'s' if lines > 1 else ''} from {home_name}{hint}"


def _top_names(text: str) -> set[str]:
    try:
        nodes = ast.parse(text).body
    except SyntaxError:  # in lines of another region, which has its own message
        return set()
    names: set[str] = set()
    for node in nodes:
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
    names = (path.with_name(f"{path.name}.orig{number if number > 1 else ''}") for number in itertools.count(1))
    copy = next(name for name in names if not name.exists())
    shutil.copy2(path, copy)
    return copy


def _write(path: Path, text: str) -> None:
    """Write a file with the mode and the line ends that it had."""
    mode, newline = path.stat().st_mode, "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    with atomic_write(path, "wb") as file:
        file.write(text.replace("\n", newline).encode())
    os.chmod(path, mode & 0o777)
