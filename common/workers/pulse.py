"""Records whether this worker makes progress, and whether its main thread waits.

The watchdog finds out for which rank. A step pays only for a few assignments; the watchdog's thread does the rest.
Frames of threads are read here and not in pipeline/: in a file that a student may change, that looks like tampering.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType

from common.workers.rows import Row

ACKNOWLEDGED_AND_RECEIVED = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received in Linux' struct tcp_info
STANDS_STILL = 0.002  # seconds of CPU: less than this between two looks, and a thread has only waited
STATE_SECONDS = 0.1  # between two looks at a thread: it computes if it used the CPU in between
DEBUGGERS = ("bdb.py", "pdb.py", "debugpy", "pydevd")  # in the path of a frame


class Pulse:
    """Whether this worker makes progress, and what it is doing."""

    def __init__(self) -> None:
        self.beats = 0
        self.phase = ""  # forward, backward, ...: the block of Record.phase in which the worker is
        self.rests = True  # no step is due: before training, between epochs, and after the last one
        # Of a worker that computes in several threads: adds to its row what they do.
        self.explain: Callable[[Row, Thread], Row] | None = None

    def beat(self) -> None:
        self.beats += 1
        self.rests = False


class Silence:
    """For how long a pulse has not beaten, in ticks of the watchdog.

    The time in which the process itself was stopped (Ctrl-Z, a debugger attached from outside) has no ticks and so does
    not count: the process must not be ended when it continues. `may_rest`: nor does the time in which no step is due.
    """

    def __init__(self, pulse: Pulse, may_rest: bool) -> None:
        self._pulse, self._may_rest = pulse, may_rest
        self._beats = pulse.beats
        self.ticks = 0

    def count(self) -> int:
        """Count a tick; return how many have been silent."""
        self.ticks += 1
        if self._pulse.beats != self._beats or (self._may_rest and self._pulse.rests):
            self._beats, self.ticks = self._pulse.beats, 0
        return self.ticks


class Thread:
    """A thread, seen from another one; by default the one that creates this object."""

    def __init__(self, ident: int | None = None) -> None:
        self._ident = ident or threading.get_ident()
        # A thread in a collective sleeps until gloo wakes it. Without such a clock (macOS) none counts as asleep.
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clock = clock_of(self._ident) if clock_of else None

    @property
    def cpu_seconds(self) -> float | None:
        return time.clock_gettime(self._clock) if self._clock is not None else None

    @property
    def frame(self) -> FrameType | None:
        """The innermost Python frame; None once the thread has ended."""
        return sys._current_frames().get(self._ident)

    def frames(self) -> list[tuple[str, int, str]]:
        """(file, line, function) of every Python frame, innermost first."""
        return frames_of(self.frame)

    def is_in_debugger(self) -> bool:
        return any(name in file for file, _, _ in self.frames() for name in DEBUGGERS)


def which_compute(threads: Iterable[Thread]) -> list[bool]:
    """Return for each thread whether it uses the CPU now: all are watched for the same tenth of a second."""
    watched = list(threads)
    before = [thread.cpu_seconds for thread in watched]
    time.sleep(STATE_SECONDS)
    after = [thread.cpu_seconds for thread in watched]
    return [old is None or new is None or new - old > STANDS_STILL for old, new in zip(before, after, strict=True)]


def frames_of(start: FrameType | TracebackType | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of a thread's frame or of an exception's traceback, innermost first."""
    if isinstance(start, TracebackType):
        steps = list(traceback.walk_tb(start))
        return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in reversed(steps)]
    steps = list(traceback.walk_stack(start)) if start else []
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in steps]


def runs(frame: FrameType | None, function: Callable) -> bool:
    """Return whether a thread is in this function; `frame` is its innermost one."""
    return frame is not None and frame.f_code is function.__code__


def self_in(frame: FrameType | None, method: Callable) -> object:
    """Return the object in whose method a thread is, None if it is elsewhere; `frame` is its innermost one."""
    return frame.f_locals["self"] if frame is not None and runs(frame, method) else None


def name_in_stack(function: Callable) -> tuple[str, str]:
    """Return the file and the name with which a function appears in a stack."""
    return function.__code__.co_filename, function.__code__.co_name


def place(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return folder/file:line of the innermost frame that is neither Python's, a package's nor of this folder."""
    own = os.path.dirname(__file__)
    library = os.path.dirname(os.__file__)
    for file, line, _ in frames:
        if not file.startswith((own, library, "<")) and "site-packages" not in file:
            return f"{'/'.join(file.split('/')[-2:])}:{line}"
    return ""


def bytes_moved(but_ports: Iterable[int] = ()) -> int:
    """Return the bytes sent and received on all TCP connections of this process; 0 where Linux' /proc is missing.

    While a large tensor travels, its thread waits as it does in a deadlock; the connections show the difference.
    """
    left_out, moved = set(but_ports), 0
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError, struct.error, ValueError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family == socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
                    continue
                if left_out & {connection.getsockname()[1], connection.getpeername()[1]}:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                moved += sum(struct.unpack_from("QQ", info, ACKNOWLEDGED_AND_RECEIVED))
    return moved
