"""Runs a step in a process of its own, with a deadline.

Text of a hand-in can keep a step busy inside of C code, where neither Ctrl-C nor an alarm interrupts it. Only killing
the process does. A step costs a fork of a small server process, some ten milliseconds.
"""

import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from grader.wire.processes import PDEATHSIG, prctl

MEMORY = 1 << 30  # bytes of address space that a step may take beyond what its process starts with
PRELOAD = ["staff.grade.own_texts"]

Result = TypeVar("Result")


class Unfinished(Exception):  # noqa: N818 (a message for the report, not a traceback)
    """The step was killed at its deadline, or its process died. The message says which."""


def run_apart(step: Callable[..., Result], *arguments: object, seconds: float) -> Result:
    """Return `step(*arguments)`, computed in another process. What it raises is raised here.

    May be called from several threads at once. `step` is a function of a module, and everything in `arguments` and in
    the result can be pickled. The process runs no code of a hand-in, so its pickles can be trusted.

    Raises:
        Unfinished: after `seconds`, or when the process has died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    reading, writing = context.Pipe(duplex=False)
    processors = os.sched_getaffinity(0)  # of this thread: the server has those of who came first
    process = context.Process(target=_run, args=(writing, step, arguments, processors), daemon=True)
    with reading:
        process.start()
        writing.close()
        try:
            if not reading.poll(seconds):
                raise Unfinished(f"stopped after {seconds:g} s")
            error, value = reading.recv()
        except EOFError:
            process.join()
            raise Unfinished(f"its process died with exit code {process.exitcode}") from None
        finally:
            process.kill()
            process.join()
    if error is not None:
        raise error
    return value


def _run(
    answer: multiprocessing.connection.Connection, step: Callable[..., object], arguments: tuple, processors: set[int]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; our parent decides
    os.sched_setaffinity(0, processors)
    prctl(PDEATHSIG, signal.SIGKILL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))  # beyond that: MemoryError
    result: tuple[Exception | None, object]
    try:
        result = (None, step(*arguments))
    except Exception as error:  # it is raised in the process that has asked
        result = (error, None)
    try:
        answer.send(result)
    except Exception as error:  # an exception that cannot be pickled
        answer.send((RuntimeError(f"{type(result[0] or error).__name__}: {result[0] or error}"), None))
