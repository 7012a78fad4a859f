"""Stops a run that makes no progress: each worker reports the collective in which it waits, then all exit.

Without this, a forgotten collective ends only after 30 minutes, in Gloo's own time-out, which does not say where.
"""

import contextlib
import os
import sys
import threading
import time

import torch.distributed as dist

from common.config import RunConfig
from common.workers.collectives import recorded

LOST_CONTACT = 3  # exit code of a worker that stops because of another one, or because nothing moves


class Pulse:
    """The time at which this worker last made progress."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def beat(self) -> None:
        self.last = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.last


def stop(code: int) -> None:
    """End this process at once: Gloo's threads may wait for a peer forever, so a normal exit could hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Deadline:
    """Ends the process with one line if the block takes longer than `seconds`."""

    def __init__(self, seconds: float, message: str):
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._message = f"{message} within {seconds:g} s (--join_seconds)"

    def _end(self) -> None:
        print(f"error: {self._message}", file=sys.stderr)
        stop(2)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class Watchdog:
    """A thread that ends the run when this worker, or any other, has made no progress for --hang_seconds.

    The first watchdog that notices writes this to a store on rank 0. Every watchdog reads the store each second. So a
    worker in an endless loop stops too, although it waits for no other worker.
    """

    def __init__(self, config: RunConfig, pulse: Pulse):
        self._config = config
        self._pulse = pulse
        self._closed = threading.Event()
        self._store = self._connect()
        pulse.beat()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()

    def close(self) -> None:
        """The run is over."""
        self._closed.set()
        self._thread.join(timeout=5)

    def leave_together(self) -> None:
        """The store is on rank 0, which waits here until the others no longer need it."""
        self.close()
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # a worker that died meanwhile has been reported elsewhere
            gone = self._store.add("left", 1)
            deadline = time.monotonic() + self._config.hang_seconds
            while self._config.rank == 0 and gone < self._config.world_size and time.monotonic() < deadline:
                time.sleep(0.05)
                gone = self._store.add("left", 0)

    def report(self, reason: str) -> None:
        """Print one line to stderr: why this rank stops, and its last collective with file and line."""
        collectives = recorded(with_places=True)
        last = f"last collective: {collectives[-1]}" if collectives else "no collective so far"
        print(f"\nrank {self._config.rank}: {reason}; {last}", file=sys.stderr, flush=True)

    def _connect(self) -> dist.Store | None:
        """A store of our own at the first worker: the group's store belongs to the main thread, which may hang."""
        with contextlib.suppress(RuntimeError):
            group_store = dist.distributed_c10d._get_default_store()
            return group_store.clone() if hasattr(group_store, "clone") else None
        return None

    def _watch(self) -> None:
        patience = self._config.hang_seconds
        while not self._closed.wait(min(1.0, patience / 4)):
            word = self._word_from_others()
            if word or self._pulse.age > patience:
                if not word:
                    self._leave_word()
                self.report(word or f"no progress for {patience:g} s (--hang_seconds)")
                time.sleep(2)  # the others read the word within a second and report too, before this end disturbs them
                stop(LOST_CONTACT)

    def _leave_word(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(
                    "hang",
                    f"rank {self._config.rank} saw no progress for {self._config.hang_seconds:g} s and stopped the run",
                )

    def _word_from_others(self) -> str:
        if self._store is None:
            return ""
        with contextlib.suppress(RuntimeError):
            if self._store.check(["hang"]):
                return self._store.get("hang").decode()
        return ""
