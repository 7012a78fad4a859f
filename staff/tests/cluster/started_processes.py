"""Helpers of the cluster's tests: start a command, wait for what it must do, find processes that outlived it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.paths import ROOT

DEADLINE_SECONDS = 60  # for a machine that is busy; nothing waits so long when all is well


def run(*words: str | Path, **options) -> subprocess.CompletedProcess:
    """`python -m ...` or any script from the repository's root, to its end, output as text."""
    command = [sys.executable, *map(str, words)]
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": DEADLINE_SECONDS, "cwd": ROOT}
    return subprocess.run(command, **defaults | options)


@contextmanager
def started(*words: str | Path, **options) -> Iterator[subprocess.Popen]:
    """The same in the background; killed at the end if the test has not ended it."""
    # Tests that were started in the background ignore SIGINT, and a child would inherit that; a handler it does not.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        process = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, **options)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition()` holds; an AssertionError that says `what` was missing at the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s in vain for: {what}"
        time.sleep(0.02)


def processes_with(mark: str | Path) -> list[int]:
    """All living processes that carry `mark` in their environment or command line, children of children included."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            continue  # it has ended meanwhile, or is somebody else's
        if str(mark).encode() in text and not dead and int(entry.name) != os.getpid():
            pids.append(int(entry.name))
    return pids
