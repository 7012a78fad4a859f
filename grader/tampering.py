"""Marks what an instructor should look at by hand: code that reaches for the grader, or for the interpreter below it.

    look_at(tree, ["pipeline/pipe.py"])    # reads the files, runs nothing: [Flag("pipeline/pipe.py", 12, "reads ...")]

A flag takes no points. The other flags come from runs: early exits, forged messages, replaced functions (see audit).
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from grader.texts import Texts

MODULES = {
    "grader": "imports the grader", "staff": "imports the course's staff tools",
    "tests": "imports the course's tests", "gc": "looks through all objects", "ctypes": "reaches into memory",
    "mmap": "reaches into memory", "signal": "handles signals", "faulthandler": "handles crashes",
    "importlib": "imports by hand", "runpy": "runs files as code", "pkgutil": "imports by hand",
    "imp": "imports by hand", "marshal": "makes code objects", "dis": "reads code objects",
    "builtins": "changes what Python offers", "subprocess": "starts programs", "pty": "starts programs",
    "base64": "decodes text", "codecs": "decodes text", "zlib": "decodes text",
    "posix": "reaches the operating system by hand", "_thread": "reaches the interpreter",
    "_signal": "handles signals", "_ctypes": "reaches into memory", "cffi": "reaches into memory",
    "pickletools": "decodes text",
}  # fmt: skip
FRAMES = {
    "f_back", "f_locals", "f_globals", "f_builtins", "f_code", "tb_frame", "gi_frame", "cr_frame", "ag_frame",
    "gi_code", "_getframe", "_current_frames", "_current_exceptions", "currentframe", "getouterframes",
    "getinnerframes", "getgeneratorlocals", "getclosurevars", "walk_stack", "walk_tb", "settrace", "setprofile",
    "addaudithook",
}  # fmt: skip
INSIDES = {
    "__globals__", "__closure__", "cell_contents", "__code__", "__subclasses__", "__bases__", "__base__", "__mro__",
    "__builtins__", "__getattribute__", "__self__", "__wrapped__", "__loader__", "__spec__", "__reduce__",
    "__reduce_ex__", "__array_interface__", "__array_struct__", "from_address", "meta_path", "path_hooks",
    "CodeType", "FunctionType",
}  # fmt: skip
ENDS = {"_exit", "abort", "closerange", "dup2", "execv", "execve", "execvp", "posix_spawn", "forkpty"}
OF_A_MODULE = {  # module -> attributes that are ordinary words elsewhere
    "os": {"kill", "killpg", "fork", "system", "popen", "dup", "write", "close"},
    "sys": {"modules", "excepthook", "unraisablehook"},
    "inspect": {"stack", "trace", "getmembers", "getmembers_static", "getattr_static"},
    "types": {"FrameType", "TracebackType", "CellType"},
    "threading": {"settrace", "setprofile", "excepthook"},
}
CODE = {"exec", "eval", "compile", "__import__", "globals", "breakpoint"}
LIBRARIES = {
    "torch", "numpy", "transformers", "common", "queue", "threading", "multiprocessing", "time", "json", "math",
    "random", "builtins", "socket", "itertools", "functools", "collections",
}  # fmt: skip
SYSTEM = {"sys", "os", "inspect", "types"}
SETTINGS = ("torch.backends", "torch._dynamo.config")  # ordinary code sets these
PLACES = re.compile(r"/proc/[^/ ]*/(mem|fd|maps|environ|task)|/dev/(fd|mem)|\bgrader[./]\w")
WORD = re.compile(r"\w+")
COMPILED = {".so", ".pyc", ".pyd", ".dll", ".dylib", ".pth"}
NAMES = FRAMES | INSIDES | ENDS
CHANGES = {"update", "setdefault", "pop", "clear", "__setitem__", "__delitem__"}  # of a dictionary
MAX_FLAGS = 50  # of one file
MAKES_TEXT = ast.Constant | ast.BinOp | ast.JoinedStr | ast.Call | ast.Subscript


class Flag(NamedTuple):
    """Something to look at by hand. `line` is 0 where it belongs to no line."""

    file: str
    line: int
    what: str


def look_at(tree: Path, files: Iterable[str], ours: Path | None = None) -> list[Flag]:
    """Flags of the given files, in order. What cannot be read as Python has none: running it will say what is wrong.

    A file that is, byte for byte, the one in `ours` has none either.
    """
    return [flag for file in files if not _same(tree, ours, file) for flag in _look_at_file(tree, file)]


def _same(tree: Path, ours: Path | None, file: str) -> bool:
    try:
        return ours is not None and (tree / file).read_bytes() == (ours / file).read_bytes()
    except OSError:
        return False


def _look_at_file(tree: Path, file: str) -> list[Flag]:
    if Path(file).suffix in COMPILED:
        return [] if "__pycache__" in Path(file).parts else [Flag(file, 0, "is compiled code")]
    if not file.endswith(".py"):
        return []
    try:
        module = ast.parse((tree / file).read_bytes(), file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    try:
        found = {Flag(file, line, what) for line, what in _look(module)}
    except RecursionError:
        return [Flag(file, 0, "is nested too deeply to be read")]
    return sorted(found)[:MAX_FLAGS]


def _look(module: ast.Module) -> Iterator[tuple[int, str]]:
    names = _imported_names(module)
    alone, texts = _docstrings(module), Texts(module)
    for node in ast.walk(module):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((line, what) for what in _imports(node))
        elif isinstance(node, ast.Attribute):
            yield from ((line, what) for what in _attribute(node, names))
        elif isinstance(node, ast.Call):
            yield from ((line, what) for what in _call(node, names, texts))
        elif isinstance(node, ast.Name) and node.id in CODE | NAMES:
            yield line, f"uses {node.id}"
        elif isinstance(node, ast.MatchClass) and (read := NAMES & set(node.kwd_attrs)):
            yield line, f"reads {min(read)}"
        elif isinstance(node, MAKES_TEXT) and id(node) not in alone:
            yield from ((line, what) for text in texts.of(node)[0] for what in _named(text))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            yield from ((line, what) for target in targets for what in _replaced(target, names))


def _named(text: str) -> Iterator[str]:
    if hidden := ({text} & NAMES) | ((FRAMES | INSIDES) & set(WORD.findall(text))):
        yield f"names {min(hidden)} as text"
    elif place := PLACES.search(text):
        yield f"names {place[0]} as text"


def _imported_names(module: ast.Module) -> dict[str, str]:
    """Name in the file -> what was imported under it."""
    names = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def _docstrings(module: ast.Module) -> set[int]:
    """Texts that stand alone as statements: they name what they like."""
    return {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if reason := MODULES.get(module.split(".")[0]):
            yield f"imports {module}: {reason}"
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.name in NAMES or alias.name in OF_A_MODULE.get(node.module or "", ()):
                yield f"imports {node.module}.{alias.name}"


def _path(node: ast.expr, names: dict[str, str]) -> str:
    """`torch.nn.Module` for such an expression whose first name was imported, else ""."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *reversed(parts)])


def _attribute(node: ast.Attribute, names: dict[str, str]) -> Iterator[str]:
    owner = _path(node.value, names)
    if node.attr in FRAMES:
        yield f"reads {node.attr}: the frames of its callers"
    elif node.attr in INSIDES:
        yield f"reads {node.attr}"
    elif node.attr in ENDS or node.attr in OF_A_MODULE.get(owner, ()):
        yield f"uses {owner + '.' if owner else ''}{node.attr}"


def _call(node: ast.Call, names: dict[str, str], texts: Texts) -> Iterator[str]:
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    if called in ("getattr", "setattr", "delattr", "hasattr") and len(node.args) > 1:
        owner, (found, all_known) = _path(node.args[0], names), texts.of(node.args[1])
        if suspect := {*found} & (NAMES | CODE | OF_A_MODULE.get(owner, set())):
            yield f"{called} of {min(suspect)}"
        elif not (all_known or (called, owner) == ("getattr", "torch") or _is_plain(node.args[1], owner)):
            yield f"{called} on {owner or 'an object'} with a name computed at run time"
        elif called != "getattr" and called != "hasattr" and _is_library(owner):
            yield f"replaces {owner}.{found[0] if found else 'something'}"
    by_name = _path(node.func, names) in ("operator.attrgetter", "operator.methodcaller")
    if by_name and not all(texts.of(argument)[1] for argument in node.args):
        yield "takes attributes by a name computed at run time"
    if called == "vars" and node.args and (owner := _path(node.args[0], names)):
        yield f"takes the names in {owner}"
    if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES and (space := _space(node.func.value)):
        yield f"changes {space}"
    if isinstance(node.func, ast.Attribute) and node.func.attr == "__new__" and not _in_its_own_new(node):
        yield "makes an object that is not initialised"
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("fromhex", "unhexlify", "b64decode"):
        yield "decodes text that may be code"
    if any(keyword.arg == "fileno" for keyword in node.keywords):
        yield "opens a descriptor by its number"
    if called == "open" and node.args and isinstance(node.args[0], ast.Constant) and type(node.args[0].value) is int:
        yield "opens a descriptor by its number"


def _space(node: ast.expr) -> str:
    """`vars(...)` or `__dict__`, where it belongs to another object than self; else ""."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
        return "" if _is_name(node.args[0], "self") else "vars() of an object"
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return "" if _is_name(node.value, "self") else "the __dict__ of an object"
    return ""


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _in_its_own_new(node: ast.Call) -> bool:
    """super().__new__(cls) and object.__new__(cls), as a class has them in its own __new__."""
    return bool(node.args) and _is_name(node.args[0], "cls")


def _is_plain(node: ast.expr, owner: str) -> bool:
    """f"block{i}" of an object, whatever i is."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and not _is_library(owner) else None
    begins = str(first.value) if isinstance(first, ast.Constant) else ""
    return begins[:1].isalpha() and owner not in SYSTEM and not any(name.startswith(begins) for name in NAMES)


def _replaced(target: ast.expr, names: dict[str, str]) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _replaced(part, names)
    elif isinstance(target, ast.Subscript) and (space := _space(target.value)):
        yield f"changes {space}"
    elif isinstance(target, ast.Attribute) and _is_library(_path(target.value, names)):
        path = f"{_path(target.value, names)}.{target.attr}"
        if not path.startswith(SETTINGS):
            yield f"replaces {path}"


def _is_library(path: str) -> bool:
    return path.split(".")[0] in LIBRARIES
