"""Compares the modules that a student's file imports with those that course.toml allows it.

It looks at import statements anywhere in the file, __import__ and importlib, code made from strings, and the student's
own files that it imports: what one file may not import, a file beside it may not fetch for it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from course.table import Course
from grader.given_files import is_given
from grader.verdicts import Crashed

STRINGS = ("exec", "eval", "compile")


def complaint(tree: Path, file: str, course: Course) -> str:
    """Name the first import that the course does not allow, in a line; "" if there is none.

    Raises:
        Crashed: a file that is no Python.
    """
    allowed = course.allowed_imports(file)
    if allowed is None:
        return ""
    todo, known = [file], {file}
    while todo:
        current = todo.pop(0)
        for line, module in imported(tree / current, current):
            own_files = _students(tree, current, module, course)
            new = [name for name in own_files if name not in known]
            todo, known = todo + new, known | set(new)
            listed = any(f"{module}.".startswith(f"{name}.") for name in allowed)
            if not listed and (not own_files or current == file):
                through = "" if current == file else f" ({file} imports this file)"
                return f"{current}:{line} {_verb(module)}; allowed here: only {', '.join(allowed)}{through}"
    return ""


def libraries(tree: Path, file: str, course: Course) -> list[str]:
    """Return the groups of inside/preload.py that loading a file needs: none where it may not import transformers, the
    models where it does at its top, else what scripts need."""
    allowed = course.allowed_imports(file)
    if allowed is not None and "transformers" not in allowed:
        return []
    try:
        body = ast.parse((tree / file).read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        body = []  # loading it says what is wrong
    at_top = {node.module for node in body if isinstance(node, ast.ImportFrom)}
    return ["scripts", "steps", "models"] if "transformers" in at_top else ["scripts"]


def _verb(module: str) -> str:
    return f"calls {module}" if module.endswith("()") else f"imports {module}"


def imported(path: Path, file: str) -> list[tuple[int, str]]:
    """Return line and module of every import; "exec()" for a call that makes code. Raise Crashed for no Python."""
    try:
        tree = ast.parse(path.read_bytes(), file)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise Crashed(f"{file} cannot be read: {type(error).__name__}: {error}") from None
    return sorted(_imports(tree))


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every import in a file, and for every call that makes code of a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)  # which may be a module
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield node.lineno, "__import__()"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STRINGS:
            yield node.lineno, f"{node.func.id}()"


def _students(tree: Path, file: str, module: str, course: Course) -> list[str]:
    """Return the files that an import may find in the tree, if they are the student's and not the course's."""
    if module.endswith("()"):
        return []
    name = module.strip(".").replace(".", "/")
    places = [name, f"{Path(file).parent.as_posix()}/{name}"]
    files = [f"{place}{end}" for place in places for end in (".py", "/__init__.py")]
    return [
        file
        for file in dict.fromkeys(files)
        if course.may_student_change(file) and (tree / file).is_file() and not _shipped(tree, file, course)
    ]


def _shipped(tree: Path, file: str, course: Course) -> bool:
    """Return whether the course wrote this file: it has limits of its own, or it is as it was given out."""
    if course.allowed_imports(file) is not None:
        return True
    return is_given(tree, file)
