"""Grade one submission with the strongest isolation that this machine supports, and report which layers are active.

    python -m staff.sandbox --probe     show which layers work here; the last line is JSON

Isolation layers, each used where the machine supports it and named in every report:

    user       each submission's ranks run as a separate user (needs root), who cannot read other users' files or
               signal their processes
    landlock   ranks read Python, the course's files and their own folder, and nothing else: no grader, solution,
               hidden test, report or other submission; signals and tracing end at the rank as well
    seccomp    calls that no lesson needs (ptrace, mount, other families of sockets, ...) are refused
    network    a private network that contains only the rank; if that is impossible, no sockets
    scratch    file systems of limited size for what a rank writes, deleted with the rank; if that is impossible, the
               supervisor checks the size
    limits     address space, file size, processes, open files, CPU time, no core files
    memory     nobody but root can look into the graders while they run (not dumpable)

The graders' own process has a limit of memory, so a rank that sends too much ends its own grading and nothing else.

Always there: the graders are in other processes than the ranks and take values from them, never verdicts; a clean
environment; a tree of its own; a deadline; a watch on memory; a sweep of all that is left. staff/attacks.py tries them.

bubblewrap, nsjail and systemd-run isolate a program that they start. Ranks are forked from a process that has imported
torch; a program of its own would cost each rank 5 s.
"""

import contextlib
import functools
import json
import os
import pwd
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.paths import ROOT, cache_dir
from course.table import load_course
from grader.wire.processes import prctl
from staff.sandbox import kernel, landlock, seccomp
from staff.sandbox.readable import readable

CONFINING = ("user", "landlock", "seccomp", "network", "scratch", "limits", "memory")
OF_STAFF = ("staff", "docs", ".git")  # beside the files that hold solutions
END_TIME = 60  # seconds beyond the deadline in which the supervisor must have swept and answered
UIDS = range(20_000, 60_000)  # where a container maps only 65,536 users, these are among them


@dataclass(frozen=True)
class SandboxJob:
    """What the supervisor is to run; see run_graded."""

    tree: str
    report: str
    tests: Sequence[str]
    seed: int | None
    deadline_s: float


@dataclass(frozen=True)
class Outcome:
    """What came of grading one submission; points and messages are in the report, if there is one.

    `exit_code` is pytest's: 0 all passed, 1 some failed; 124 the deadline has passed; negative: killed by a signal.
    `peak_pss_mb` is the largest sum over graders and ranks, looked at every 5 s; `swept` counts processes that had
    to be killed at the end; `output` is what pytest printed, for staff; `sandbox` says which layers were active.
    """

    exit_code: int
    timed_out: bool
    wall_s: float
    peak_pss_mb: float
    swept: int
    output: str
    sandbox: dict[str, object] = field(default_factory=dict)


def run_graded(
    tree: Path,
    report: Path,
    *,
    tests: Sequence[str],
    seed: int | None,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run `tests` (pytest's node ids, relative to the repository) on `tree`, which goes; blocks until all is swept.

    The files of the tree are plain and can be read by every user. May be called from several threads or processes at
    once. If the caller is killed, everything below dies. `env` is added to a small environment of our own. Nothing that
    a submission does raises here.

    Raises:
        InputError: `tree` is no folder.
    """
    if not Path(tree).is_dir():
        raise InputError(f"{tree}: expected the folder of a submission's files, found none; unpack it first")
    job = SandboxJob(os.path.abspath(tree), os.path.abspath(report), tests, seed, deadline_s)
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; "
               "runpy.run_module('staff.sandbox.supervisor', run_name='__main__')"]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment() | dict(env or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            output, errors = process.communicate(json.dumps(asdict(job)).encode(), timeout=deadline_s + END_TIME)
            return Outcome(**json.loads(output))
        except (subprocess.TimeoutExpired, ValueError, TypeError):
            process.kill()
            _, errors = process.communicate()
            text = errors.decode(errors="replace")[-2000:]
            died = f"the supervisor has died: {text}"
            code = process.returncode or os.EX_SOFTWARE
            return Outcome(code, timed_out=False, wall_s=deadline_s, peak_pss_mb=0.0, swept=0, output=died)
        except BaseException:  # Ctrl-C, too, leaves no supervisor behind
            process.kill()
            raise


def environment() -> dict[str, str]:
    """All that graders and ranks are told of the outside: no token, no path of a home."""
    passed_on = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "COS598D_SLOWNESS")
    copied = {name: os.environ[name] for name in passed_on if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    cache = str(cache_dir("models").parent)
    names = dict.fromkeys(("USER", "LOGNAME"), "student")  # there may be no name for the rank's user
    return copied | threads | names | {"COS598D_CACHE": cache, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}


@functools.cache
def probe() -> dict[str, Any]:
    """Return what works on this machine: layer -> whether it is active, and "level", one line that says it in words."""
    root = os.geteuid() == 0
    held: dict[str, object] = {
        "root": root,
        "user": root and _in_child(_try_other),
        "landlock": landlock.version() > 0,
        "landlock_version": landlock.version(),
        "seccomp": seccomp.available() and _in_child(lambda: seccomp.install(False, None)),
        "network": _in_child(lambda: kernel.own_namespaces(kernel.NEW_NETWORK)),
        "scratch": _in_child(_mount_scratch),
        "limits": True,
        "memory": True,
    }
    closed = held["landlock"] and _in_child(_try_to_read_secrets)
    held["files"] = "landlock" if closed else "modes" if root and not open_secrets() else "open"
    return held | {"level": _level(held)}


def _level(held: Mapping[str, Any]) -> str:
    files = {
        "landlock": "files protected by Landlock",
        "modes": "files protected by file modes",
        "open": "FILES READABLE BY SUBMISSIONS",
    }
    return "; ".join(
        [
            "a separate user per submission" if held["user"] else "same user as the graders",
            files[held["files"]],
            "no network" if held["network"] or held["seccomp"] else "NETWORK OPEN",
            "system calls filtered" if held["seccomp"] else "system calls not filtered",
            "scratch space of limited size" if held["scratch"] else "scratch space monitored",
        ]
    )


def _in_child(try_it: Callable[[], object]) -> bool:
    """Whether something that cannot be taken back works, in a process that has only this to do."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try_it()
            code = 0
        except BaseException:  # whatever it raises, this child ends; the exit code says it
            pass
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def become_other() -> None:
    """As root: make this process that of a user who is nobody else, and who can still run Python."""
    make_interpreter_reachable()
    uid = free_uid()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _try_other() -> None:
    become_other()
    os.listdir(sys.base_prefix)
    os.listdir(ROOT / "grader")


def _try_to_read_secrets() -> None:
    """Give up all files as a rank does, then open what nobody may read. Raises RuntimeError if one can be opened."""
    files = [path for name in secrets() if (path := ROOT / name).is_file()] + [ROOT / "course.toml"]
    prctl(kernel.NO_NEW_PRIVS, 1)
    landlock.restrict(readable(), [], tcp=False)
    for path in files:
        with contextlib.suppress(PermissionError), open(path, "rb"):
            raise RuntimeError(f"{path} can be read")


def _mount_scratch() -> None:
    folder = tempfile.gettempdir()  # found by writing a file, which is over once nothing can be written
    kernel.own_namespaces(kernel.NEW_MOUNTS)
    kernel.only_read()
    kernel.mount("scratch", folder, "tmpfs", 0, "size=1m")


def free_uid() -> int:
    """A user id for one submission: that of no account, and of no other grader that runs now."""
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                taken.add(os.stat(f"/proc/{name}").st_uid)
            except OSError:
                continue
    return random.SystemRandom().choice([uid for uid in UIDS if uid not in taken])


def make_interpreter_reachable() -> None:
    """As root, where Python lies in a folder closed to other users (/root): show it and the repository to our ranks.

    In mounts of our own: an empty folder over the closed one, and in it again what Python is made of. Only where
    Landlock hides the rest of it from the ranks.
    """
    if os.geteuid() != 0 or not landlock.version() or not (closed := closed_folders()):
        return
    wanted = [Path(sys.base_prefix), Path(sys.prefix), ROOT, Path(tempfile.gettempdir()), cache_dir("models").parent]
    kernel.own_namespaces(kernel.NEW_MOUNTS)
    for folder in closed:
        inside = [path for path in wanted if folder in path.parents]
        open_ones = [(path, os.open(path, os.O_PATH)) for path in dict.fromkeys(inside)]
        kernel.mount("python", folder, "tmpfs", 0, "mode=755")
        for path, descriptor in open_ones:
            path.mkdir(parents=True, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{descriptor}", path, "", kernel.BIND | kernel.RECURSIVE)
            os.close(descriptor)


def closed_folders() -> list[Path]:
    """The outermost folders above Python and the repository that other users may not pass through."""
    closed = []
    for place in (Path(sys.base_prefix), Path(sys.prefix), ROOT):
        above = [folder for folder in reversed([place, *place.parents]) if not folder.stat().st_mode & 0o001]
        closed += above[:1]
    return list(dict.fromkeys(closed))


def refuse_exposed(paths: Iterable[Path]) -> None:
    """Raise InputError if one of these lies in or below what every rank may read: see readable.py."""
    folders = [Path(os.path.realpath(path)) for path in readable()]
    for path in paths:
        real = Path(os.path.realpath(path))
        for folder in folders:
            if folder == real or folder in real.parents:
                raise InputError(
                    f"{path}: expected a place that submissions cannot read, but it is in {folder}, which every "
                    "submission can read (Python and the system's libraries); move it, for example to /srv/course"
                )


def open_secrets() -> list[str]:
    """What holds solutions or hidden tests and can be read by every user of the machine."""
    passable = all(folder.stat().st_mode & 0o001 for folder in (ROOT, *ROOT.parents))
    return [name for name in secrets() if passable and (ROOT / name).stat().st_mode & 0o004]


def secrets() -> list[str]:
    """What no submission may read: all that is for staff, and of what ships each file whose solution is cut out."""
    course = load_course()
    paths = {path for pattern in OF_STAFF for path in ROOT.glob(pattern)}
    for pattern in ("*/*.py", *course.ships):  # folders of tasks that the course leaves out, too
        paths |= {path for path in ROOT.glob(pattern) if path.is_file() and b"# BEGIN SOLUTION" in path.read_bytes()}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def protect() -> list[str]:
    """As root: close the secrets to all other users, for machines without Landlock. Returns what was closed."""
    closed = open_secrets()
    for name in closed:
        path = ROOT / name
        path.chmod(path.stat().st_mode & ~0o007)
    return closed
