"""For how long a rank has made no progress: no batch, no phase, no call, and neither computing nor a transfer."""

import threading
import time
from collections.abc import Iterable

from common.linux import bytes_moved
from common.workers.collectives import pending, uses_nccl
from common.workers.frames import frame_of, frames_of
from common.workers.pulse import Pulse

TICK_SECONDS = 0.5
WORK_SECONDS = 0.03  # of the CPU in a tick; in a process that waits, gloo's polling threads use up to 0.015
MUCH_LONGER = 10  # times as long, a rank that computes may stay in one step
DEBUGGERS = ("bdb.py", "pdb.py", "debugpy", "pydevd")  # in the path of a frame


class Stillness:
    """Counts ticks: the time in which the process itself was stopped (Ctrl-Z, a closed laptop) must not count.

    own: file descriptors of connections whose bytes are no progress. may_rest: nobody waits for this worker, so it may
    download or draw between its steps.
    """

    def __init__(self, pulse: Pulse, hang_seconds: float, own: Iterable[int], may_rest: bool) -> None:
        self._pulse, self._own, self._may_rest = pulse, set(own), may_rest
        self._main = threading.current_thread()
        self._limit = hang_seconds / TICK_SECONDS
        self._progress: tuple = ()
        self._cpu = 0.0
        self._bytes = 0
        self._in_this_step = 0  # ticks without a batch, a phase or a call
        self.idle = 0  # ticks without anything

    def tick(self) -> None:
        self._in_this_step += 1
        self.idle += 1
        progress = self._pulse.beats, self._pulse.calls, self._pulse.iteration, self._pulse.phase
        in_debugger = any(name in file for file, _, _ in frames_of(frame_of(self._main)) for name in DEBUGGERS)
        if progress != self._progress or in_debugger or (self._may_rest and self._pulse.rests):
            self._progress, self._in_this_step, self.idle = progress, 0, 0
        cpu = time.process_time() - time.thread_time()  # of all threads but the one that calls this
        moved = bytes_moved(self._own) if self.idle else self._bytes
        if cpu - self._cpu > WORK_SECONDS or moved != self._bytes:
            self.idle = 0
        self._cpu, self._bytes = cpu, moved

    def is_too_long(self) -> bool:
        if self._in_this_step < MUCH_LONGER * self._limit and self.idle < self._limit:
            # A thread that waits for a GPU uses the CPU.
            return self._in_this_step >= self._limit and uses_nccl() and bool(pending())
        return True
