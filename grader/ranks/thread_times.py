"""Evidence from the kernel that every partition works in a thread of its own.

    rank, worker of partition j   ── begins ─────────────────────────────────────────────>   referee
                                  <── a token, to one partition at a time, once all of its cycle have begun ──
    it pays: PBKDF2 of the token and its input, milliseconds of CPU time that nobody can shorten
                                  ── asks for its permit, with the digest ────────────>   which thread used that time?

The kernel counts the CPU time of each thread, and the referee computes the same digest to know what it costs here. So
what a rank says about its threads decides nothing. Where the kernel does not count (no /proc/PID/task/*/schedstat),
only the digests are checked.
"""

import contextlib
import hashlib
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROUNDS = 75_000  # of PBKDF2, about 20 ms; the same number stands in probes/pipeline/permits.py
LEAST = (
    0.4  # of the digest's cost: CPU time of the thread that computes it (measured for right programs: 0.68 and more)
)
MOST_BESIDE = 0.35  # of that thread's time: what all other threads may use meanwhile (measured: up to 0.26)
MOST_IN_ALL = 3.0  # of the digest's cost: what all threads together may use (measured: up to 2.16)
CLOCK_DELAY = 0.3  # seconds until the kernel has counted a thread that still runs
Place = tuple[int, int, int]  # call, micro-batch, partition


def digest(token: str, content: np.ndarray) -> str:
    return hashlib.pbkdf2_hmac("sha256", token.encode() + content.tobytes(), b"", ROUNDS).hex()


@dataclass
class ThreadTimes:
    """The threads that have computed the digests of one rank, by the kernel's count.

    `problem` is the first sign that no thread of its own was at work for each partition, "" if there is none.
    """

    pid: int = 0  # of the rank
    problem: str = ""
    _token: str = ""
    _before: dict[int, float] = field(default_factory=dict)
    _thread_of: dict[int, int] = field(default_factory=dict)  # partition -> thread

    def begin(self) -> str:
        """Return the token for the partition whose turn it is."""
        self._before, self._token = cpu_times(self.pid), secrets.token_hex(16)
        return self._token

    def end(self, place: Place, content: np.ndarray, answer: object) -> None:
        """Judge a turn: its digest, and the thread that has paid for it."""
        begin = time.thread_time()
        right = digest(self._token, content)
        cost = time.thread_time() - begin
        if answer != right:
            problem = f"partition {place[2]} has not worked on micro-batch {place[1]}"
        else:
            problem = self._judge_threads(place, cost) if self._before else ""
        self.problem = self.problem or problem

    def _judge_threads(self, place: Place, cost: float) -> str:
        (_, i, j), limit = place, time.monotonic() + CLOCK_DELAY
        while True:
            spent = {thread: now - self._before.get(thread, 0.0) for thread, now in cpu_times(self.pid).items()}
            main = spent.pop(self.pid, 0.0)
            thread, seconds = max(spent.items(), key=lambda item: item[1], default=(0, 0.0))
            if seconds >= LEAST * cost or time.monotonic() > limit:
                break
            time.sleep(CLOCK_DELAY / 60)
        beside = main + sum(spent.values()) - seconds
        if seconds < LEAST * cost:
            return f"no worker has computed what partition {j} makes of micro-batch {i}"
        if beside > MOST_BESIDE * seconds or beside + seconds > MOST_IN_ALL * cost:
            return f"while partition {j} worked on micro-batch {i}, other threads than its worker computed"
        if self._thread_of.setdefault(j, thread) != thread:
            return f"partition {j} works in several threads: it has one worker, behind in_queues[{j}]"
        if list(self._thread_of.values()).count(thread) > 1:
            return "two partitions work in one thread: each needs its own worker"
        return ""


def cpu_times(pid: int) -> dict[int, float]:
    """Seconds of CPU time of each thread of a process, as the kernel counts them; {} where it does not tell."""
    times = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                times[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times
