"""Checks with the kernel's CPU times that every worker of a rank works in a thread of its own.

    rank, a worker                ── begins ─────────────────────────────────────────────>   referee
                                  <── a token, to one worker at a time, once all of its group have begun ──
    it pays: PBKDF2 of the token and its input, milliseconds of CPU time that nobody can shorten
                                  ── asks for its permit, with the digest ────────────>   which thread used that time?

The kernel counts the CPU time of each thread, and the referee computes the same digest to know what it costs here. So
what a rank says about its threads decides nothing. Where the kernel does not count (no /proc/PID/task/*/schedstat),
only the digests are checked, and a test says `not checked: threads`.
"""

import contextlib
import hashlib
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROUNDS = 75_000  # of PBKDF2, about 20 ms; a thread in a rank must run as many
# Limits of CPU time, with what was measured for right programs:
LEAST = 0.4  # times the digest's cost: what the thread that computes it must use (0.68 and more)
MOST_BESIDE = 0.35  # times that thread's time: what all other threads may use meanwhile (up to 0.26)
MOST_IN_ALL = 3.0  # times the digest's cost: what all threads together may use (up to 2.16)
CLOCK_DELAY = 0.3  # seconds until the kernel has counted a thread that still runs


def digest(token: str, content: np.ndarray) -> str:
    return hashlib.pbkdf2_hmac("sha256", token.encode() + content.tobytes(), b"", ROUNDS).hex()


@dataclass
class ThreadTimes:
    """The threads that have computed the digests of one rank, by the kernel's count.

    `problem` is the first sign that a worker has no thread of its own, "" if there is none.
    """

    pid: int = 0  # of the rank
    problem: str = ""
    _token: str = ""
    _before: dict[int, float] = field(default_factory=dict)
    _thread_of: dict[str, int] = field(default_factory=dict)  # worker -> thread

    def begin(self) -> str:
        """Return the token for the worker whose turn it is."""
        self._before, self._token = cpu_times(self.pid), secrets.token_hex(16)
        return self._token

    def end(self, worker: str, task: str, content: np.ndarray, answer: object) -> None:
        """Judge a turn: its digest, and the thread that has paid for it. Messages name the worker and its task."""
        begin = time.thread_time()
        right = digest(self._token, content)
        cost = time.thread_time() - begin
        if answer != right:
            problem = f"{worker} has not worked on {task}"
        else:
            problem = self._judge_threads(worker, task, cost) if self._before else ""
        self.problem = self.problem or problem

    def _judge_threads(self, worker: str, task: str, cost: float) -> str:
        """Say what is wrong with the CPU times since the turn began; "" if one thread of its own has worked."""
        limit = time.monotonic() + CLOCK_DELAY
        while True:
            spent = {thread: now - self._before.get(thread, 0.0) for thread, now in cpu_times(self.pid).items()}
            main = spent.pop(self.pid, 0.0)  # the main thread, whose id is the pid: it is no worker's
            thread, seconds = max(spent.items(), key=lambda item: item[1], default=(0, 0.0))
            if seconds >= LEAST * cost or time.monotonic() > limit:
                break
            time.sleep(CLOCK_DELAY / 60)
        beside = main + sum(spent.values()) - seconds
        if seconds < LEAST * cost:
            return f"no thread has computed what {worker} makes of {task}"
        if beside > MOST_BESIDE * seconds or beside + seconds > MOST_IN_ALL * cost:
            return f"while {worker} worked on {task}, other threads computed, too"
        if self._thread_of.setdefault(worker, thread) != thread:
            return f"{worker} works in several threads: expected one"
        if same := [other for other, its_thread in self._thread_of.items() if its_thread == thread and other != worker]:
            return f"{same[0]} and {worker} work in one thread: each needs its own"
        return ""


def kernel_counts() -> bool:
    """Return whether this machine's kernel counts the CPU time of each thread."""
    return bool(cpu_times(os.getpid()))


def cpu_times(pid: int) -> dict[int, float]:
    """Return the seconds of CPU time of each thread of a process, as the kernel counts them; {} if it does not."""
    times = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                times[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times
