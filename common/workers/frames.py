"""Where a thread is, read from its Python frames by another thread.

Frames are read here and not in pipeline/: in a file that a student may change, that looks like tampering.
"""

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType

LIBRARIES = os.path.dirname(os.__file__), os.path.dirname(__file__), "<"  # Python's own, this folder, no file at all


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost Python frame of a thread; None once it has ended."""
    return sys._current_frames().get(thread.ident or 0)


def frames_of(start: FrameType | TracebackType | None) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, function) of a thread's frames, or of those of an exception's traceback, innermost first."""
    if isinstance(start, TracebackType):
        steps: Iterable[tuple[FrameType, int]] = list(traceback.walk_tb(start))[::-1]
    else:
        steps = traceback.walk_stack(start) if start else ()
    for frame, line in steps:
        yield frame.f_code.co_filename, line, frame.f_code.co_name


def runs(frame: FrameType | None, function: Callable) -> bool:
    """Return whether a thread is in this function; `frame` is its innermost one."""
    return frame is not None and frame.f_code is function.__code__


def self_in(frame: FrameType | None, method: Callable) -> object:
    """Return the object in whose method a thread is, None if it is elsewhere; `frame` is its innermost one."""
    return frame.f_locals["self"] if frame is not None and runs(frame, method) else None


def name_in_stack(function: Callable) -> tuple[str, str]:
    """Return the file and the name with which a function appears in a stack."""
    return function.__code__.co_filename, function.__code__.co_name


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file is Python's, a package's or of this folder."""
    return file.startswith(LIBRARIES) or "site-packages" in file


def place(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return folder/file:line of the innermost frame that is in no library."""
    return next((f"{'/'.join(file.split('/')[-2:])}:{line}" for file, line, _ in frames if not is_library(file)), "")
