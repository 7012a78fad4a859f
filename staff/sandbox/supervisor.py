"""Runs the graders on one submission, watches what that costs, and leaves nothing of it behind.

    staff.sandbox.graded_run.run_graded      starts this module, one process per submission, and reads its last word
      supervisor                  trusted: prepares, watches memory and time, sweeps; the subreaper of all below
        pytest, forked from it    trusted: the graders; no student's code
          zygote                  trusted: forks ranks (grader/inside/zygote.py)
            ranks                 the student's code, isolated by staff/sandbox/confine.py

Each dies with the one above it, so a kill -9 anywhere leaves nothing running.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from common.paths import ROOT
from grader.wire.processes import CONFINE, DUMPABLE, PDEATHSIG, SUBREAPER, descendants, kill_all, memory, prctl
from staff.sandbox import kernel
from staff.sandbox.confine import MIB, Policy
from staff.sandbox.graded_run import CONFINING, SandboxJob, free_uid, make_interpreter_reachable, probe

LOOK = 0.5  # seconds between two looks at the memory
RECORD = 5.0  # seconds between two measurements for the record: each takes 70 ms of a processor
MOST_OUTPUT = 20_000
GRADERS_MEMORY = 1536  # MiB of address space for the graders' own process, which needs 200
SPARE_FILES = 20_000  # in all ranks' folders, where these have no file systems of their own
DEADLINE_CODE = 124


class SandboxSupervisor:
    """One submission's run."""

    def __init__(self, job: SandboxJob) -> None:
        self.job = job
        self.next_record = time.monotonic() + LOOK
        self.peak = 0.0
        self.timed_out = False
        self.swept: set[int] = set()
        self.uid = free_uid()
        self.record = probe()

    def run(self) -> dict[str, object]:
        """Everything from the preparation to the sweep; what came of it."""
        start = time.monotonic()
        prctl(SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it is waited for, see _watch
        if self.record["user"]:
            make_interpreter_reachable()
        with tempfile.TemporaryDirectory(prefix="cos598d-grading-", ignore_cleanup_errors=True) as stage:
            os.chmod(stage, 0o711)  # the ranks' folders lie in here, whose names nobody else can list
            tree = Path(stage, "tree")
            shutil.move(self.job.tree, tree)
            policy = Policy(tuple(wall for wall in CONFINING if self.record[wall]), self.uid, str(tree))
            output = open(Path(stage, "output"), "w+b")  # noqa: SIM115 (closed with the process)
            os.chmod(output.name, 0o600)
            pid = os.fork()
            if pid == 0:
                run_pytest(self.job, policy, Path(stage), output.fileno())
            try:
                code = self._watch(pid, policy, Path(stage))
            finally:
                self._sweep()
            output.seek(max(0, output.seek(0, os.SEEK_END) - MOST_OUTPUT))
            printed = output.read().decode(errors="replace")
        return {
            "exit_code": code,
            "timed_out": self.timed_out,
            "wall_s": round(time.monotonic() - start, 2),
            "peak_pss_mb": round(self.peak, 1),
            "swept": len(self.swept),
            "output": printed,
            "sandbox": self.record,
        }

    def _watch(self, pid: int, policy: Policy, stage: Path) -> int:
        """Wait for pytest, until the deadline; meanwhile kill ranks that together take too much."""
        limit = time.monotonic() + self.job.deadline_s
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > limit:
                self.timed_out = True
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return DEADLINE_CODE
            self._look(pid, policy, stage)
            signal.sigtimedwait({signal.SIGCHLD}, LOOK)

    def _look(self, pid: int, policy: Policy, stage: Path) -> None:
        """Kill ranks that together take too much. Exact sizes, which cost the kernel a walk over all pages, are read if
        a bound is too much, or for the record."""
        processes = {pid, *descendants(os.getpid(), set())}
        ranks = processes - self._trusted(pid)
        may_be_too_much = sum(map(memory, ranks)) > policy.memory * MIB  # pages that ranks share count more than once
        if may_be_too_much or time.monotonic() >= self.next_record:
            self.next_record = time.monotonic() + RECORD
            sizes = {process: pss_mb(process) for process in processes}
            self.peak = max(self.peak, sum(sizes.values()))
            may_be_too_much = sum(sizes[process] for process in ranks) > policy.memory
        full = "scratch" not in policy.walls and folder_mb(stage) > policy.scratch * 8
        if may_be_too_much or full:
            for process in ranks:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)

    def _trusted(self, pid: int) -> set[int]:
        """pytest and its child, the zygote; all below that is a rank's."""
        children = Path(f"/proc/{pid}/task/{pid}/children")
        with contextlib.suppress(OSError):
            return {pid, *map(int, children.read_text().split())}
        return {pid}

    def _sweep(self) -> None:
        """Kill what is left: by name of the user, which no fork outruns, and all that has become a child of ours."""
        self.swept = kill_all(lambda: descendants(os.getpid(), set()))
        if self.record["user"]:
            kernel.kill_user(self.uid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass


def pss_mb(pid: int) -> float:
    """A process's share of the memory in MiB (PSS): a page that n processes use counts 1/n. Where the kernel does not
    tell us that of another user's or a guarded process, the pages that are certainly its own."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return memory(pid) / MIB


def run_pytest(job: SandboxJob, policy: Policy, stage: Path, output: int) -> NoReturn:
    """The forked child: pytest from the root of the repository, in an environment of its own making."""
    code = os.EX_SOFTWARE
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        prctl(PDEATHSIG, signal.SIGKILL)
        prctl(DUMPABLE, 0)  # nobody but root can trace this process or read its memory
        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # the zygote, which needs more, lifts the soft one for itself
        resource.setrlimit(resource.RLIMIT_AS, (GRADERS_MEMORY * MIB, hard))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ[CONFINE] = f"staff.sandbox.confine:confine {policy.to_json()}"
        os.environ["TMPDIR"] = tempfile.tempdir = str(stage)
        os.chdir(ROOT)
        import pytest

        seed = [] if job.seed is None else ["--seed", str(job.seed)]
        fixed = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        fixed += [] if "network" in policy.walls else ["--no-network"]
        tree = [f"--tree={policy.tree}", "--report", job.report]
        code = int(pytest.main([*fixed, *tree, *seed, *job.tests]))
    except BaseException:  # whatever it is, this process must not go on in its parent's code
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def folder_mb(folder: Path) -> float:
    """What the files below a folder take, in MiB; counting ends where they are too many, and says infinitely much."""
    total = 0.0
    for count, size in enumerate(_sizes(folder)):
        total += size / MIB
        if count > SPARE_FILES:
            return float("inf")
    return total


def _sizes(folder: Path) -> Iterator[int]:
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(where, name)).st_blocks * 512


def main() -> None:
    """Job as JSON on stdin, outcome as JSON on the last line of stdout."""
    prctl(PDEATHSIG, signal.SIGKILL)
    job = SandboxJob(**json.load(sys.stdin))
    result = os.dup(1)  # stdout holds the result alone: from here on, whatever is printed goes to stderr
    os.dup2(2, 1)
    outcome = SandboxSupervisor(job).run()
    os.write(result, json.dumps(outcome).encode() + b"\n")


if __name__ == "__main__":
    assert ctypes.sizeof(ctypes.c_void_p) == 8, "the filters are written for 64-bit machines"
    main()
