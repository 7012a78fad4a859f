"""Marks files that a person should look at: one static list of words that ordinary solutions do not need.

    look_at(tree, ["lesson.py"])    # reads the files, runs nothing: [Flag("lesson.py", 12, "_getframe")]

A flag takes no points and proves nothing: a word is easily hidden. It says which hand-in to open first.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Names, imported modules, attributes, and words inside of texts.
WORDS = frozenset({
    # the graders, and what starts or imports code by hand
    "grader", "staff", "importlib", "runpy", "pkgutil", "imp", "marshal", "subprocess", "pty", "__import__",
    "sys.modules", "meta_path", "path_hooks", "__loader__", "__spec__", "get_data",
    # memory and the interpreter
    "ctypes", "_ctypes", "cffi", "mmap", "gc", "dis", "inspect", "faulthandler", "posix", "_signal",
    "currentframe", "_getframe", "_current_frames", "walk_stack", "walk_tb", "settrace", "setprofile", "addaudithook",
    "f_back", "f_locals", "f_globals", "f_builtins", "f_code", "tb_frame", "gi_frame", "cr_frame", "ag_frame",
    "__globals__", "__closure__", "cell_contents", "__code__", "__subclasses__", "__bases__", "__base__", "__mro__",
    "__builtins__", "__getattribute__", "__self__", "__wrapped__", "__reduce__", "__reduce_ex__", "CodeType",
    "FunctionType", "fileno", "mem",
    # processes and signals
    "fork", "forkpty", "posix_spawn", "execv", "execve", "_exit", "abort", "killpg", "signal", "setsid", "dup2",
    "flock",
    # torch below its documented interface
    "_put", "Reducer", "__torch_function__",
    # texts that may be code
    "base64", "zlib", "codecs", "fromhex", "unhexlify",
})  # fmt: skip
BUILTINS = frozenset({"exec", "eval", "compile", "globals", "breakpoint"})  # models have a method eval
LIBRARIES = ("torch.", "dist.", "numpy.", "np.", "transformers.", "common.", "queue.", "threading.", "time.")
SETTINGS = ("torch.backends.", "torch._dynamo.config.")  # ordinary code sets these
COMPILED = {".so", ".pyc", ".pyd", ".dll", ".dylib", ".pth"}


class Flag(NamedTuple):
    """Something to look at by hand. `line` is 0 where it belongs to no line."""

    file: str
    line: int
    what: str

    @property
    def word(self) -> str:
        """What it is without the number of lines."""
        return self.what.partition(", in ")[0]


def look_at(tree: Path, files: Iterable[str], course_copy: Path | None = None) -> list[Flag]:
    """Return one flag for each file and word. A word that the file in `course_copy` has, too, gives none, and a file
    that is no Python has none either: running it will say what is wrong."""
    flags = []
    for file in files:
        if not _same(tree, course_copy, file):
            ours = {flag.word for flag in _look_at_file(course_copy, file)} if course_copy else set[str]()
            flags += [flag for flag in _look_at_file(tree, file) if flag.word not in ours]
    return flags


def _same(tree: Path, other: Path | None, file: str) -> bool:
    try:
        return other is not None and (tree / file).read_bytes() == (other / file).read_bytes()
    except OSError:
        return False


def _look_at_file(tree: Path, file: str) -> list[Flag]:
    """Return one flag for each suspicious word of a file, with the first line where it is."""
    if Path(file).suffix in COMPILED:
        return [] if "__pycache__" in Path(file).parts else [Flag(file, 0, "is compiled code")]
    if not file.endswith(".py"):
        return []
    try:
        return list(_flags(file, (tree / file).read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


@functools.lru_cache(maxsize=256)  # a bank grades many trees with the same files in one process
def _flags(file: str, content: bytes) -> tuple[Flag, ...]:
    module = ast.parse(content, file)
    lines: dict[str, set[int]] = {}
    for line, what in _suspects(module):
        lines.setdefault(what, set()).add(line)
    more = {what: f", in {len(places)} lines" if len(places) > 1 else "" for what, places in lines.items()}
    return tuple(Flag(file, min(places), what + more[what]) for what, places in sorted(lines.items()))


def _suspects(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for every suspicious word of a file; a docstring may name what it likes."""
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        line, names = getattr(node, "lineno", 0), list[str]()
        match node:
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
            case ast.ImportFrom():
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            case ast.Name():
                names = [node.id]
                if node.id in BUILTINS:
                    yield line, f"calls {node.id}"
            case ast.Attribute():
                names = [node.attr, ast.unparse(node)]
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names = re.findall(r"\w+", text)
            case ast.Assign():
                for target in map(ast.unparse, node.targets):
                    if target.startswith(LIBRARIES) and not target.startswith(SETTINGS):
                        yield line, f"replaces {target}"
        yield from ((line, f"names {word}") for word in WORDS.intersection(names))
