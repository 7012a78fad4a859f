"""The isolation layers of one rank: called in the freshly forked process, before any of the student's code is there.

The zygote calls `confine` by its name (COS598D_CONFINE, see grader/inside/zygote.py). Which layers there are was found
out before, by staff/sandbox/graded_run.py: one that cannot be built here raises, and the rank does not start.
"""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grader.wire.processes import DUMPABLE, PDEATHSIG, prctl
from staff.sandbox import kernel, landlock, seccomp
from staff.sandbox.readable import readable

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Policy:
    """The active isolation layers and their limits; sizes in MiB, times in seconds of CPU."""

    walls: tuple[str, ...]  # the layers, of staff.sandbox.graded_run.CONFINING
    uid: int  # whom a rank becomes if the layer "user" is active
    tree: str
    sockets: bool = False  # internet sockets may be made
    starts: bool = False  # other processes may be started
    measured: bool = False  # its memory is measured: there is no other place for bytes
    memory: int = 2048  # address space a rank may take beyond what it is forked with
    file: int = 32  # the largest file it may write
    scratch: int = 64  # all its files, where it has a file system of its own
    processes: int = 64  # of this user, threads included; a right solution has 18
    cpu: int = 300
    files: int = 128  # open at once; a right solution has 33

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def confine(rank: int, folder: str, allows: Sequence[str], measured: bool, written: str) -> None:
    """Isolate this process by a written policy. Raises OSError if a layer is not available. See grader/in_rank.py."""
    policy = Policy(**json.loads(written))
    own_network = "network" in policy.walls and "network" in allows
    sockets, starts = policy.sockets or own_network, "processes" in allows
    build(replace(policy, sockets=sockets, starts=starts, measured=measured), folder)


def build(policy: Policy, folder: str) -> None:
    """Apply the layers from the outermost to the innermost: each needs calls that a later one refuses."""
    walls, sockets = policy.walls, policy.sockets
    if "network" in walls or "scratch" in walls:
        kinds = {"network": kernel.NEW_NETWORK, "scratch": kernel.NEW_MOUNTS}
        namespaces = sum(kind for wall, kind in kinds.items() if wall in walls)
        kernel.own_namespaces(namespaces)
    if "network" in walls:
        _small_buffers()
    if "user" in walls:
        os.chmod(os.path.dirname(folder), 0o711)
        os.chown(folder, policy.uid, policy.uid)
    if "limits" in walls:
        set_limits(policy)
    if "scratch" in walls:
        kernel.only_read()
        _own_scratch(policy, folder)
    _drop_rights(policy)
    os.environ["HOME"] = folder
    prctl(PDEATHSIG, signal.SIGKILL)  # a change of the user has cleared it
    prctl(kernel.NO_NEW_PRIVS, 1)
    if "user" not in walls:  # where two layers keep others out, the supervisor may read how much memory this takes
        prctl(DUMPABLE, int("landlock" in walls and "seccomp" in walls))
    if "landlock" in walls:
        shared = [SHARED_MEMORY] if "scratch" in walls else []
        landlock.restrict([*readable(), policy.tree], [folder, "/dev/null", *shared], tcp=sockets)
    if "seccomp" in walls:
        scoped = "landlock" in walls and landlock.version() >= 6
        others_out_of_reach = "user" in walls or scoped
        signals_to = None if others_out_of_reach else os.getpid()
        seccomp.install(sockets, signals_to, policy.starts, policy.measured)


def _small_buffers() -> None:
    """Bound what the kernel keeps for a connection, which may grow to 10 MiB and is in no process's memory."""
    with contextlib.suppress(OSError):  # where this may not be set, the number of sockets is the bound
        for name in ("tcp_rmem", "tcp_wmem"):
            Path("/proc/sys/net/ipv4", name).write_text("4096 65536 131072")


def _own_scratch(policy: Policy, folder: str) -> None:
    """File systems of limited size in place of the rank's folder and of shared memory, seen by this rank alone.

    Where memory is measured, there is room for the folder alone: names of files and links would hold bytes, too.
    """
    flags, files = kernel.NO_SUID | kernel.NO_DEVICES, 1 if policy.measured else 2000
    for place in (folder, SHARED_MEMORY):
        if Path(place).is_dir():
            kernel.mount("scratch", place, "tmpfs", flags, f"size={policy.scratch}m,nr_inodes={files},mode=1777")
    os.chdir(folder)


def set_limits(policy: Policy) -> None:
    """What the kernel counts by itself. NPROC counts a user's threads everywhere, so it is set relative to them."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + policy.memory * MIB,
        resource.RLIMIT_FSIZE: policy.file * MIB,
        resource.RLIMIT_NPROC: policy.processes + _threads_counted(policy),
        resource.RLIMIT_NOFILE: policy.files,
        resource.RLIMIT_CPU: policy.cpu,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 8 * MIB,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1000 + policy.processes,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file too large is an error to read about, not a death
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this goes first


def _threads_counted(policy: Policy) -> int:
    """How many threads the kernel counts against this user before a rank starts any. None for a user who is nobody yet,
    and none inside of a new user namespace, which has a count of its own since Linux 5.14."""
    spaces = os.geteuid() != 0 and {"network", "scratch"} & set(policy.walls)
    release = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    if "user" in policy.walls or (spaces and release >= (5, 14)):
        return 0
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def _drop_rights(policy: Policy) -> None:
    if "user" in policy.walls:
        os.setgroups([])
        os.setresgid(policy.uid, policy.uid, policy.uid)
        os.setresuid(policy.uid, policy.uid, policy.uid)
    elif os.geteuid() != 0 and ("network" in policy.walls or "scratch" in policy.walls):
        kernel.drop_capabilities()
