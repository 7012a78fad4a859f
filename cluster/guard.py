"""Runs one command on this machine while standard input stays open, then stops it and everything it started.

The launcher holds the other end of that input: a pipe here, an ssh connection to another node. No matter how the
launcher ends, even by kill -9 or because a cable was pulled, the input closes. Then the guard stops its command:
SIGTERM to the command's process group, SIGKILL a few seconds later. The guard is started by path and imports no module
of this repository, so it starts within 20 ms and works in any folder:

    python cluster/guard.py --share 4 -- python task1_single/run_glue.py
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_SECONDS = 2.5  # from SIGTERM to SIGKILL: enough to write a record; all ranks end within 5 s of a failure
LINUX = sys.platform == "linux"  # elsewhere a killed guard leaves its command running
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--share", type=int, default=1, help="number of commands that share this machine's cores")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # a line is shown when it is printed, not when 8 KiB are full
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_command(arguments.share)))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(arguments.share))  # as torchrun does: workers share GPUs, too
    os.environ["COS598D_LAUNCHED"] = "1"  # a run that is stopped leaves its report to the launcher, as data
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    command = [word for index, word in enumerate(arguments.command) if index or word != "--"]
    between = die_with_parent if LINUX else None  # whatever it is, with a function Python forks, which macOS may not
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=between)
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: start_thread(stop, child.pid))
    start_thread(stop_when_input_closes, child.pid)
    code = child.wait()
    kill_what_is_left(child.pid)
    return exit_code(code)


def threads_per_command(share: int) -> int:
    """Return the cores for each of `share` commands.

    By default, each PyTorch process uses all cores, which slows down all of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // share)


def exit_code(returncode: int) -> int:
    """Return the exit code as a shell shows it: the program's own, or 128 + the signal that ended it."""
    return returncode if returncode >= 0 else 128 - returncode


def start_thread(function, *arguments) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def stop_when_input_closes(group: int) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop(group)


def stop(group: int) -> None:
    """Ask the process group to end, then kill it; what another user runs in it (sudo) is only for that user to end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os.killpg(group, signal.SIGKILL)


def kill_what_is_left(group: int) -> None:
    """The command has ended: end what it started, also what left its process group (this process adopts orphans)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # as in `stop`
        os.killpg(group, signal.SIGKILL)
    adopted = Path("/proc/self/task") / str(os.getpid()) / "children"
    with contextlib.suppress(OSError):  # /proc is Linux's, and this file an option of the kernel
        while pids := adopted.read_text().split():
            for pid in map(int, pids):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def die_with_parent() -> None:
    """Between fork and exec: if this guard is killed, the kernel kills the command."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    if LINUX:
        _LIBC.prctl(option, value, 0, 0, 0)


_LIBC = ctypes.CDLL(None)  # loaded here, because between fork and exec nothing should be imported

if __name__ == "__main__":
    sys.exit(main())
