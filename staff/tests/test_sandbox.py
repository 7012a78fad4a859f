"""The walls of a rank, each tried from inside by a process that is built one; then whole runs of the graders."""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from grader.wire.processes import descendants
from staff.proofs.bank import copy_tree
from staff.sandbox import __main__ as command
from staff.sandbox import graded_run, kernel
from staff.sandbox.confine import Policy, build
from staff.sandbox.graded_run import probe, run_graded

pytestmark = pytest.mark.medium

TEST = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
PREADV2 = {"x86_64": 327, "aarch64": 286}[os.uname().machine]
PTRACE = {"x86_64": 101, "aarch64": 117}[os.uname().machine]


def behind(folder: Path, walls: tuple[str, ...], try_it: Callable[[], object], **policy: Any) -> str:
    """What `try_it` returns, or the error it raises, in a child behind these walls whose folder is `folder`."""
    missing = [wall for wall in walls if not probe()[wall]]
    if missing:
        pytest.skip(f"the wall {missing[0]} cannot be built on this machine")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            rules = replace(Policy(walls, 54_321, str(folder)), **policy)
            if "user" in walls:
                graded_run.make_interpreter_reachable()
            build(rules, str(folder))
            answer = str(try_it())
        except BaseException as error:  # it is the answer that the test reads
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A rank's folder, below one that others may pass through."""
    (tmp_path / "rank0").mkdir()
    return tmp_path / "rank0"


def test_the_probe_says_in_words_and_as_json_what_holds(capsys):
    command.main(["--probe"])

    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["level"] == lines[-2]


def larger_buffer() -> None:
    with socket.socket(socket.AF_INET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)


def watch() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    kernel.checked(libc.inotify_add_watch(libc.inotify_init(), b"/", 1), "inotify_add_watch")


def lock(by: Callable[..., object]) -> None:
    with open(sys.executable, "rb") as file:
        by(file, fcntl.LOCK_SH)


def limit_the_parent() -> None:
    """To what it is: without the wall, the parent is this test."""
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))


def forked() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def many_files() -> None:
    for number in range(10):
        Path(str(number)).write_bytes(bytes(1 << 20))


def read_what_is_in_memory() -> None:
    """Read only what the page cache has (RWF_NOWAIT)."""
    buffer = ctypes.create_string_buffer(1)
    where = struct.pack("PN", ctypes.addressof(buffer), 1)
    with open(sys.executable, "rb") as file:
        kernel.syscall(PREADV2, *map(ctypes.c_long, (file.fileno(),)), where, *map(ctypes.c_long, (1, 0, 0, 8)))


ANYBODY_MAY: dict[str, tuple[str, Callable[[], object]]] = {  # what every process may do, and the wall against it
    "read a file outside": ("landlock", lambda: Path("../secret").read_text()),
    "write a file outside": ("landlock", lambda: Path("../new").write_text("x")),
    "fork": ("seccomp", forked),
    "start a program": ("seccomp", lambda: subprocess.run(["true"]).returncode),
    "lock a file, which others see": ("seccomp", lambda: lock(fcntl.flock)),
    "lock a part of a file": ("seccomp", lambda: lock(fcntl.lockf)),
    "ask which pages of a file are in memory": ("seccomp", read_what_is_in_memory),
    "drop them": (
        "seccomp",
        lambda: lock(lambda file, _: os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)),
    ),
    "choose its processors": ("seccomp", lambda: os.sched_setaffinity(0, os.sched_getaffinity(0))),
    "limit its parent": ("seccomp", limit_the_parent),
    "signal its parent": ("seccomp", lambda: os.kill(os.getppid(), 0)),
    # memory of the kernel, which nobody counts
    "make a pair of sockets": ("seccomp", socket.socketpair),
    "send datagrams": ("seccomp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)),
    "make a file without a name": ("seccomp", lambda: os.memfd_create("x")),
    "make a larger pipe": ("seccomp", lambda: fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)),
    "make a larger buffer": ("seccomp", larger_buffer),
    "watch a folder": ("seccomp", watch),
    "write a large file": ("limits", lambda: Path("a").write_bytes(bytes(2 << 20))),
    "take much memory": ("limits", lambda: len(bytes(300 << 20))),
    "write many files": ("scratch", many_files),
}
REFUSED = ("PermissionError", "[Errno 1]", "File too large", "MemoryError", "No space left")


@pytest.mark.parametrize("wall, try_it", ANYBODY_MAY.values(), ids=ANYBODY_MAY)
def test_a_rank_is_kept_from_what_anybody_may_do(folder, wall, try_it):
    (folder.parent / "secret").write_text("secret")

    answer = behind(folder, (wall,), try_it, sockets=True, file=1, memory=200, scratch=4)
    assert any(words in answer for words in REFUSED), answer
    assert list(folder.iterdir()) == [] or wall != "scratch"  # gone with the rank
    assert "Error" not in behind(folder, (), try_it)


@pytest.mark.parametrize("keep", [
    os.pipe,
    lambda: os.symlink("x" * 4000, "link"),
    lambda: os.setxattr(".", "user.kept", bytes(1000)),
    lambda: os.mkdir("x" * 250),
])  # fmt: skip
def test_where_memory_is_measured_nothing_else_holds_bytes(folder, keep):
    answer = behind(folder, ("scratch", "seccomp"), keep, measured=True)

    assert any(words in answer for words in REFUSED), answer
    assert "Error" not in behind(folder, ("seccomp",), keep)


def test_a_limit_cannot_be_raised_again(folder):
    answer = behind(folder, ("limits",), lambda: resource.getrlimit(resource.RLIMIT_FSIZE), file=1)

    assert answer == str((1 << 20, 1 << 20))


@pytest.mark.parametrize("walls", [("seccomp",), ("network", "seccomp")])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX, socket.AF_NETLINK])
def test_only_a_probe_that_needs_sockets_may_make_them(folder, walls, family):
    kind = socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_STREAM

    assert "PermissionError" in behind(folder, walls, lambda: socket.socket(family, kind))


def test_a_rank_writes_in_its_own_folder_starts_threads_signals_itself_and_where_it_may_starts_python(folder):
    def in_a_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: 7).result()

    code = f"{sys.executable} -c 'print(\"OK\")'"
    assert behind(folder, ("landlock",), lambda: Path("own").write_text("x")) == "1"
    assert behind(folder, ("seccomp",), in_a_thread) == "7"
    assert behind(folder, ("seccomp",), lambda: os.kill(os.getpid(), 0)) == "None"
    assert "OK" in behind(folder, ("landlock", "seccomp"), lambda: subprocess.getoutput(code), starts=True)
    assert "[Errno 1]" in behind(folder, ("seccomp",), lambda: kernel.syscall(PTRACE, 16, os.getppid(), None, None))


def readable(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        with contextlib.suppress(PermissionError):
            os.listdir(path) if path.is_dir() else path.read_text()
            yield path


def test_neither_a_solution_nor_a_grader_nor_a_folder_beside_the_systems_can_be_read(folder):
    solutions = [ROOT / file for file in ("common/data_partition.py", "staff/sandbox/graded_run.py", "course.toml")]
    secrets = [*solutions, ROOT / "grader", *(ROOT / "grader").rglob("*.py"), folder.parent]
    above = {path for place in (ROOT, folder, Path(sys.prefix), Path(sys.base_prefix)) for path in place.parents}
    places = [*secrets, *above, *(path for path in Path("/").iterdir() if path.is_dir() and not path.is_symlink())]

    for given in ("landlock",), ("landlock", "scratch"):
        assert behind(folder, given, lambda: set(readable(places))) == "set()"
    assert behind(folder, (), lambda: len(list(readable(secrets)))) == str(len(secrets))


@pytest.mark.parametrize("place", [Path(sys.prefix, "lib/class"), Path("/usr/share/class")])
def test_a_class_that_lies_where_every_rank_may_read_is_refused(place, tmp_path):
    with pytest.raises(InputError, match="a place that submissions cannot read"):
        graded_run.refuse_exposed([tmp_path, place])


def test_every_file_with_a_solution_can_be_closed_to_other_users():
    secrets = graded_run.secrets()
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name[0] not in "._"]
    regions = [
        path for folder in folders for path in folder.rglob("*.py") if b"\n    # BEGIN SOLUTION" in path.read_bytes()
    ]
    closed = [path for path in regions if any(path.is_relative_to(ROOT / name) for name in secrets)]

    assert {region.file for region in load_course().regions.values()} <= set(secrets)
    assert ROOT / "cluster/hello.py" in closed and closed == regions


def test_a_network_of_its_own_reaches_itself_and_nobody_else(folder):
    def meet_oneself() -> str:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            return "met"

    with socket.create_server(("127.0.0.1", 0)) as outside:
        address = outside.getsockname()
        assert "ConnectionRefusedError" in behind(folder, ("network",), lambda: socket.create_connection(address, 5))
    assert behind(folder, ("network", "seccomp"), meet_oneself, sockets=True) == "met"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_a_rank_is_another_user_for_good(folder):
    assert behind(folder, ("user",), lambda: (os.getresuid(), os.getgroups())) == "((54321, 54321, 54321), [])"
    assert "PermissionError" in behind(folder, ("user",), lambda: os.setuid(0))
    assert graded_run.free_uid() in graded_run.UIDS


def test_capabilities_of_a_new_user_namespace_are_given_up(folder):
    def rights() -> str:
        return next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))

    walls = ("user", "network", "scratch") if os.geteuid() == 0 else ("network", "scratch")
    assert behind(folder, walls, rights).split()[1].strip("0") == ""


def test_graders_are_told_nothing_of_the_outside(monkeypatch):
    monkeypatch.setenv("PLATFORM_TOKEN", "secret")

    assert "PLATFORM_TOKEN" not in graded_run.environment()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy_tree(tmp_path / "tree")
    return tmp_path / "tree"


MEMORY = """
import pytest

def test_memory_beyond_the_limit_of_the_graders_is_refused() -> None:
    with pytest.raises(MemoryError):
        bytes(2 << 30)
"""


def test_a_solved_task_passes_behind_all_walls_and_its_graders_have_a_limit_of_memory(tree, tmp_path):
    (tmp_path / "test_memory.py").write_text(MEMORY)
    tests = [TEST, str(tmp_path / "test_memory.py")]

    outcome = run_graded(tree, tmp_path / "report.json", tests=tests, seed=None, deadline_s=300)

    assert (outcome.exit_code, outcome.swept, outcome.timed_out) == (0, 0, False), outcome.output
    assert "2 passed" in outcome.output
    assert json.loads((tmp_path / "report.json").read_text())["score"] == 2
    assert outcome.peak_pss_mb > 20
    assert outcome.sandbox["level"]


def test_a_killed_caller_takes_graders_and_ranks_along(tree, tmp_path):
    (tree / "common/data_partition.py").write_text("import time\ntime.sleep(600)\n")
    code = (
        f"from pathlib import Path; from staff.sandbox.graded_run import run_graded; run_graded(Path({str(tree)!r}), "
        f"Path({str(tmp_path / 'r')!r}), tests=[{TEST!r}], seed=1, deadline_s=300)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    limit = time.monotonic() + 100
    while len(below := descendants(caller.pid, set())) < 3 and time.monotonic() < limit:  # the last is the zygote
        time.sleep(0.1)

    caller.kill()
    caller.wait()

    assert len(below) >= 3
    while any(map(alive, below)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(map(alive, below))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
