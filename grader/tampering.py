"""Marks files that a person should look at: one static list of words that ordinary solutions do not need.

    look_at(tree, ["lesson.py"])    # reads the files, runs nothing: [Flag("lesson.py", 12, "_getframe")]

A flag takes no points and proves nothing: a word is easily hidden. It says which hand-in to open first.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Names, imported modules, attributes, and words inside of texts.
WORDS = frozenset({
    # the graders, and what starts or imports code by hand
    "grader", "staff", "importlib", "runpy", "pkgutil", "imp", "marshal", "subprocess", "pty", "__import__",
    "meta_path", "path_hooks", "__loader__", "__spec__", "get_data",
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
OF_MODULES = frozenset({"sys", "os", "importlib", "inspect", "gc", "builtins"})  # taken from another module: typing.sys
LIBRARIES = frozenset({"torch", "numpy", "transformers", "common", "queue", "threading", "multiprocessing", "time"})
SETTINGS = ("torch.backends", "torch._dynamo.config")  # ordinary code sets these
COMPILED = {".so", ".pyc", ".pyd", ".dll", ".dylib", ".pth"}
MOST_LINES = 5  # lines named in one flag


class Flag(NamedTuple):
    """Something to look at by hand. `line` is 0 where it belongs to no line."""

    file: str
    line: int
    what: str


def look_at(tree: Path, files: Iterable[str], course_copy: Path | None = None) -> list[Flag]:
    """Return one flag for each file and word. A file that equals the one in `course_copy` byte for byte has none, and
    one that is no Python has none either: running it will say what is wrong."""
    return [flag for file in files if not _same(tree, course_copy, file) for flag in _look_at_file(tree, file)]


def _same(tree: Path, other: Path | None, file: str) -> bool:
    try:
        return other is not None and (tree / file).read_bytes() == (other / file).read_bytes()
    except OSError:
        return False


def _look_at_file(tree: Path, file: str) -> list[Flag]:
    """Return one flag for each suspicious word of a file, with the lines where it is."""
    if Path(file).suffix in COMPILED:
        return [] if "__pycache__" in Path(file).parts else [Flag(file, 0, "is compiled code")]
    if not file.endswith(".py"):
        return []
    try:
        module = ast.parse((tree / file).read_bytes(), file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines: dict[str, set[int]] = {}
    for line, what in _suspects(module):
        lines.setdefault(what, set()).add(line)
    return [Flag(file, min(places), what + _others(sorted(places)[1:])) for what, places in sorted(lines.items())]


def _others(lines: list[int]) -> str:
    if not lines:
        return ""
    more = f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
    return f" (also line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:MOST_LINES]))}{more})"


def _suspects(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for every suspicious word of a file; a docstring may name what it likes."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }  # fmt: skip
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
                names = [node.attr]
                if (node.attr in OF_MODULES and _root(node.value) in imported) or ast.unparse(node) == "sys.modules":
                    yield line, f"takes {node.attr} from a module"
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names = "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr" as called)) if len(node.args) > 1:
                is_computed = not isinstance(node.args[1], ast.Constant | ast.JoinedStr)
                if is_computed and _root(node.args[0]) in imported - {"torch"}:
                    yield line, f"{called} with a computed name"
            case ast.Assign():
                for target in node.targets:
                    path = ast.unparse(target) if isinstance(target, ast.Attribute) else ""
                    if _root(target) in LIBRARIES & imported and path and not path.startswith(SETTINGS):
                        yield line, f"replaces {path}"
        yield from ((line, f"names {word}") for word in WORDS.intersection(names))


def _root(node: ast.AST) -> str:
    """Return the first name of `torch.nn.Module`; "" for what is no dotted name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
