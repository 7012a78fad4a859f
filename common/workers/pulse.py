"""Records when this worker last made progress, and whether its main thread waits.

The watchdog finds out for which rank. A step pays only for two assignments; the watchdog's thread does the rest.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

ACKNOWLEDGED_AND_RECEIVED = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received in Linux' struct tcp_info
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")  # the flight recorder has only collectives
STANDS_STILL = 0.002  # seconds of CPU: less than this between two looks, and a thread has only waited


class Pulse:
    """The time at which this worker last made progress, and what it was doing."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.phase = ""  # forward, backward, ...: the block of Record.phase in which the worker is

    def beat(self) -> None:
        self.last = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.last


class Thread:
    """The thread that trains, seen from another one."""

    def __init__(self, ident: int | None = None) -> None:
        self._ident = ident or threading.get_ident()
        # A thread in a collective sleeps until gloo wakes it. Without such a clock (macOS) none counts as asleep.
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clock = clock_of(self._ident) if clock_of else None

    @property
    def cpu_seconds(self) -> float | None:
        return time.clock_gettime(self._clock) if self._clock is not None else None

    def frames(self) -> list[tuple[str, int, str]]:
        """(file, line, function) of every Python frame, innermost first."""
        return frames_of(sys._current_frames().get(self._ident))


def frames_of(start: FrameType | TracebackType | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of a thread's frame or of an exception's traceback, innermost first."""
    if isinstance(start, TracebackType):
        steps = list(traceback.walk_tb(start))
        return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in reversed(steps)]
    steps = list(traceback.walk_stack(start)) if start else []
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in steps]


def place(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return folder/file:line of the innermost frame that is neither Python's, a package's nor of this folder."""
    own = os.path.dirname(__file__)
    library = os.path.dirname(os.__file__)
    for file, line, _ in frames:
        if not file.startswith((own, library, "<")) and "site-packages" not in file:
            return f"{'/'.join(file.split('/')[-2:])}:{line}"
    return ""


def torch_function(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the function of torch.distributed that is the innermost frame, "" for any other."""
    file, _, function = next(iter(frames), ("", 0, ""))
    return function if file.endswith(os.path.join("torch", "distributed", "distributed_c10d.py")) else ""


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
