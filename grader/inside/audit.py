"""Watches a rank while a student's code runs in it: what leads into the grader is refused, what resembles it is noted.

Refused to a student's own lines, with an error that says so: frames, the collector's lists of objects, ctypes, trace
functions, code objects made by hand, the files of graders, imports of `grader`. Only noted: code made from strings.
This runs in the student's process. It stops what Python's audit events show, and no native memory access.
"""

import _thread
import contextlib
import operator
import os
import signal
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from grader.wire.signatures import GRADER

REFUSED = frozenset({
    "sys._getframe", "sys._current_frames", "sys._current_exceptions", "gc.get_objects", "gc.get_referrers",
    "gc.get_referents", "sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback",
    "code.__new__", "marshal.loads",
})  # fmt: skip
NOTED = frozenset({"exec", "compile"})
NO_DEBUGGER = (
    "a debugger cannot use the terminal while the graders run; use `python -m grader.debug REGION --rank RANK` instead"
)
FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
CODE = frozenset({"__code__", "__defaults__", "__kwdefaults__"})
MAX_NOTES = 20
LIBRARIES = (  # where a replaced function is noted at the end
    "builtins", "os", "sys", "time", "json", "hashlib", "socket", "threading", "queue", "math", "random", "numpy",
    "torch", "torch.autograd", "torch.nn.functional", "torch.distributed", "torch.distributed.distributed_c10d",
    "torch.Tensor", "torch.nn.Module", "torch.optim.Optimizer", "torch.optim.SGD", "torch.optim.AdamW",
    "torch.nn.parallel.DistributedDataParallel", "torch.utils.data.DataLoader",
)  # fmt: skip


Function = tuple[str, Any, str, Any]  # name, owner, attribute, value
Note = Callable[..., None]


def notes_to(descriptor: int) -> Note:
    """note(what, where) writes a finding to a pipe of its own at once: what follows cannot take it back."""
    os.set_blocking(descriptor, False)
    seen, write = set[str](), os.write

    def note(what: str, where: str = "") -> None:
        text = f"{where[-200:]}\t{what[:200]}\n"
        if text not in seen and len(seen) < MAX_NOTES:
            seen.add(text)
            with contextlib.suppress(OSError):
                write(descriptor, text.encode(errors="replace"))

    return note


def end_notes(descriptor: int, line: str) -> None:
    """Write the line that shows that all notes before it have arrived."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{line}\n".encode())


def trusted_files() -> Callable[[str], bool]:
    """trusted(filename) says whether a file is not the student's: Python's, an installed package's or the grader's.

    It is an object of C without attributes: who finds it in a closure cannot add a file to those it trusts.
    """
    paths = sysconfig.get_paths()
    places = {*(paths[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")), GRADER}
    return operator.methodcaller("startswith", ("<frozen ", *places))


def refuse_debugger(*_arguments: object, **_keywords: object) -> None:
    """Stands for sys.breakpointhook: a rank has no terminal, so a debugger would quit without a word."""
    raise RuntimeError(NO_DEBUGGER)


def watch(note: Note, trusted: Callable[[str], bool]) -> None:
    """Install the hook. Python cannot remove it, and nothing refers to it that a student's code could reach."""
    getframe, ident, realpath = sys._getframe, _thread.get_ident, os.path.realpath
    # By name: going through all of sys.modules would copy 2,000 pages that the rank shares with the zygote, 8 ms.
    through = {sys.modules[name].__file__ for name in ("inspect", "threading", "ctypes") if name in sys.modules}
    traceback_file, busy = getattr(sys.modules.get("traceback"), "__file__", ""), set[int]()
    attributes = ("object.__getattr__", "object.__setattr__")
    seen, noted, frames, code, closed = REFUSED | NOTED | {"import", "open"}, NOTED, FRAMES, CODE, GRADER
    advice = NO_DEBUGGER

    def students_line(asked: str = "") -> str:
        """file:line of a student's line that asks by itself, or through a helper of Python's; "" for a library.

        A library's function that asks names what it asks for. One that does not was given it to call, by whom is next.
        """
        frame: types.FrameType | None = getframe(3)  # of who has caused the event: above look() and hook()
        while frame and (
            frame.f_code.co_filename in through
            or (frame.f_code.co_filename == traceback_file and frame.f_code.co_name.startswith("walk_"))
        ):
            frame = frame.f_back
        if frame and asked and trusted(frame.f_code.co_filename) and not names(frame.f_code, asked):
            while frame and trusted(frame.f_code.co_filename):
                frame = frame.f_back
        if not frame or trusted(frame.f_code.co_filename):
            return ""
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def names(code: types.CodeType, asked: str) -> bool:
        words = (*code.co_names, *code.co_freevars, *code.co_varnames)
        wanted = "frame" if "frame" in asked else asked.rpartition(".")[2].strip("_")
        return any(wanted in word for word in words)

    def look(event: str, arguments: tuple) -> Exception | None:
        if event == "import":
            name = arguments[0]
            return ImportError(f"{name} is not for graded code") if name.split(".")[0] == "grader" else None
        if event == "open":
            path = arguments[0]
            place = realpath(path) if isinstance(path, str | bytes | os.PathLike) else ""
            place = os.fsdecode(place)
            memory = place.startswith("/proc/") and place.endswith("/mem")
            if not memory and not place.startswith(closed):
                return None
            if memory or (place.endswith(".py") and students_line()):
                note(f"opens {place if memory else 'a file of the grader'}", students_line())
            return PermissionError(13, "not for graded code", place)
        if event == "object.__setattr__" and trusted(arguments[0].__code__.co_filename):
            event = f"a change of {arguments[1]}"
        by_any_hand = event in noted or event.startswith("ctypes.")
        where = students_line("" if by_any_hand else str(arguments[1]) if event in attributes else event)
        if not where or event == "object.__setattr__":
            return None
        what = f"reads {arguments[1]}" if event == "object.__getattr__" else event
        note(what, where)
        more = f"; {advice}" if event == "sys.settrace" else ""
        return None if event in noted else RuntimeError(f"{what} is refused: it is not for graded code{more}")

    def hook(event: str, arguments: tuple) -> None:
        if event == "object.__getattr__":
            if arguments[1] not in frames:
                return
        elif event == "object.__setattr__":
            if arguments[1] not in code or type(arguments[0]) is not types.FunctionType:
                return
        elif event not in seen and not event.startswith("ctypes."):
            return
        me = ident()
        if me in busy:
            return
        busy.add(me)
        try:
            error = look(event, arguments)
        finally:
            busy.discard(me)
        if error:
            raise error

    sys.addaudithook(hook)


def changes_to(note: Note, trusted: Callable[[str], bool]) -> Callable[..., None]:
    """changed(double, attribute), for the __setattr__ of a double: notes it where a student's line sets this, or with
    "reads" as third argument, for its __getattribute__, where one reads it."""
    getframe = sys._getframe

    def changed(double: str, attribute: str, does: str = "sets") -> None:
        frame = getframe(2)
        if not trusted(frame.f_code.co_filename):
            note(f"{does} {attribute} of the grader's {double}", f"{frame.f_code.co_filename}:{frame.f_lineno}")

    return changed


def close_signals(note: Note, trusted: Callable[[str], bool]) -> None:
    """A signal's handler is given the frame it interrupts: a student's lines set none. Nor do they take the numbers
    that come with signals, see zygote.count: only our own doubles wait for those."""
    import _signal

    real, getframe = signal.signal, sys._getframe

    def guarded(number: int, handler: Any) -> Any:
        frame = getframe(1)
        if not trusted(frame.f_code.co_filename):
            note("signal.signal", f"{frame.f_code.co_filename}:{frame.f_lineno}")
            raise RuntimeError("signal.signal is refused: it is not for graded code")
        return real(number, handler)

    def for_us_alone(name: str, real: Any, ours: str = GRADER) -> Any:
        def waits(*arguments: Any) -> Any:
            frame = getframe(1)
            if frame.f_code.co_filename.startswith(ours):
                return real(*arguments)
            note(f"signal.{name}", "" if trusted(frame.f_code.co_filename) else
                 f"{frame.f_code.co_filename}:{frame.f_lineno}")  # fmt: skip
            raise RuntimeError(f"signal.{name} is refused: it is not for graded code")

        return waits

    waiting = {name: getattr(_signal, name, None) for name in ("sigtimedwait", "sigwaitinfo", "sigwait")}
    closed = {name: for_us_alone(name, function) for name, function in waiting.items() if function}
    for module in (signal, _signal):
        for name, function in (closed | {"signal": guarded}).items():
            setattr(module, name, function)


@dataclass(frozen=True)
class Before:
    """How things were before ranks were forked. The zygote takes it, once for many ranks.

    A rank that went through the thousands of names in sys.modules would copy the pages they lie on.
    """

    ours: dict[str, types.ModuleType]  # the grader's modules
    replaced: Callable[[], str]  # names what was exchanged in them since, "" for nothing
    libraries: list[Function]
    identities: frozenset[int]


def before() -> Before:
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "grader"}
    return Before(ours, replaced_in(ours.values()), library_functions(), identities(ours.values()))


def identities(modules: Iterable[types.ModuleType]) -> frozenset[int]:
    """Of the grader's classes, and of the dictionaries that are its functions' globals. None of them ever goes."""
    found = set[int]()
    for module in modules:
        found.add(id(vars(module)))
        found |= {
            id(kind) for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
        }
    return frozenset(found)


def forget_ourselves(ours: Iterable[str]) -> None:
    """Take the grader's modules out of sys.modules, so that `import grader.x` finds nothing."""
    for name in ours:
        sys.modules.pop(name, None)
    vars(sys.modules["__main__"]).pop("main", None)


def replaced_in(modules: Iterable[types.ModuleType]) -> Callable[[], str]:
    """A function that names what was exchanged in these modules and their classes since now, "" for nothing."""
    spaces: list[tuple[str, Any]] = []
    for module in modules:
        spaces.append((module.__name__, module))
        spaces += [
            (f"{module.__name__}.{name}", kind)
            for name, kind in vars(module).items()
            if isinstance(kind, type) and kind.__module__ == module.__name__
        ]
    kept = [
        (f"{where}.{name}", vars(space), name, value)
        for where, space in spaces
        for name, value in vars(space).items()
        if callable(value) or isinstance(value, types.ModuleType | property | staticmethod)
    ]
    kept += _relied_on()

    # Asked for every message of a rank, so the usual answer is found at the speed of C, in half the time: 50 us for
    # 730 names. The builtins are bound here, since a student may exchange them.
    absent = [item for item in kept if item[-1] is None]  # inherited: a subclass that gets its own is changed
    present = _by_space(item for item in kept if item[-1] is not None)
    looks = [(operator.itemgetter(*names), space, values) for space, names, values in present]
    every, each, same = all, map, operator.is_

    def replaced() -> str:
        with contextlib.suppress(KeyError):  # one was deleted
            alike = every(every(each(same, get(space), values)) for get, space, values in looks)
            if alike and every(space.get(name) is None for _, space, name, _ in absent):
                return ""
        for where, space, name, value in kept:
            if space.get(name) is not value:
                return where
        return ""

    return replaced


def _by_space(kept: Iterable[Function]) -> list[tuple[Any, list[str], list[Any]]]:
    """(space, names, values), one for each run of names from one space; never one name, of which no tuple is made."""
    found: list[tuple[Any, list[str], list[Any]]] = []
    last = ""
    for where, space, name, value in kept:
        if where.removesuffix(name) != last:
            last = where.removesuffix(name)
            found.append((space, [name], [value]))
        _, names, values = found[-1]
        names.append(name)
        values.append(value)
    return found


def _relied_on() -> list[tuple[str, Any, str, Any]]:
    """What of Python and torch makes a message out of a value: whoever exchanges it writes the message."""
    import builtins
    import json

    torch = sys.modules["torch"]
    names = {
        "builtins": (builtins, [name for name, value in vars(builtins).items() if callable(value)]),
        "torch": (torch, ["Tensor", "_C", "uint8"]),
        "torch._C": (torch._C, ["DisableTorchFunctionSubclass"]),
        "torch.Tensor": (
            torch.Tensor,
            ["as_subclass", "detach", "reshape", "contiguous", "view", "clone", "numpy", "shape", "dtype"],
        ),
        "json": (json, ["dumps", "_default_encoder"]),
        "json.encoder": (json.encoder, ["c_make_encoder", "encode_basestring_ascii"]),
        "json.JSONEncoder": (json.JSONEncoder, ["encode", "iterencode"]),
    }
    kept = [
        (f"{owner}.{name}", vars(space), name, vars(space).get(name))
        for owner, (space, all) in names.items()
        for name in all
    ]
    return kept + [
        (f"sys.modules[{name!r}]", sys.modules, name, sys.modules[name]) for name in ("torch", "numpy", "json")
    ]


def library_functions() -> list[Function]:
    """(name, owner, attribute, value) of what is looked at again at the end; taken once, before ranks are forked."""
    return [
        (f"{place}.{name}", owner, name, value)
        for place in LIBRARIES
        if (owner := _find(place)) is not None
        for name, value in vars(owner).items()
        if callable(value)
    ]


def _find(place: str) -> Any:
    if place in sys.modules:
        return sys.modules[place]
    module, _, name = place.rpartition(".")
    return getattr(_find(module), name, None) if module else None


def note_patched(functions: Iterable[Function], trusted: Callable[[str], bool], note: Note) -> None:
    """Note what was replaced since then, and not by the grader's spies nor by a library itself."""
    for name, owner, attribute, value in functions:
        now = vars(owner).get(attribute, value)
        if now is not value and callable(now):
            code = getattr(now, "__code__", None)
            if code is None or not trusted(code.co_filename):
                note(f"replaces {name}", f"{code.co_filename}:{code.co_firstlineno}" if code else "")
