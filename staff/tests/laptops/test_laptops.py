"""Tasks, graders, report and archive need only what macOS has, too; and ranks start without fork as well as with it.

No Mac is needed: Python stands in for that of macOS (stand_in/macos.py), and /proc and /dev/shm are hidden.
"""

import functools
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.launch import free_port
from common.paths import ROOT
from staff.grade.submissions import write_files
from staff.tests.handouts import solved_handout

PROC = "mount --rbind /proc $STAND_IN_PROC && mount -t tmpfs none /proc && cp $STAND_IN_PROC/cpuinfo /proc"
HIDE = f'{PROC} && mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'  # torch itself reads cpuinfo on Linux
UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
STUDENT = ["--netid", "al1ce", "--name", "A. Student"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@functools.cache
def why_not() -> str:
    if sys.platform != "linux":
        return "on macOS, the tests themselves show that this works"
    tried = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/proc"], capture_output=True, text=True)
    return f"mounts are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


def interpreter(folder: Path) -> Path:
    """Make a virtual environment with this one's packages, whose Python is macOS'; return its Python."""
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    (site / "stand_in.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n{Path(__file__).parent / 'stand_in'}\nimport macos\n"
    )
    (folder / "pyvenv.cfg").write_text(
        f"home = {Path(sys.executable).resolve().parent}\ninclude-system-site-packages = false\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(Path(sys.executable).resolve())
    return folder / "bin/python"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a Python command in a solved handout on the stand-in of a Mac."""
    if why_not():
        pytest.skip(why_not())
    tree, long = tmp_path_factory.mktemp("handout"), tmp_path_factory.mktemp("T" * 100)
    write_files(solved_handout(), tree)
    python = interpreter(tmp_path_factory.mktemp("python"))
    environment = os.environ | {"TMPDIR": str(long), "STAND_IN_PROC": str(tmp_path_factory.mktemp("proc"))}
    environment |= {"COS598D_CACHE": str(tree / ".cache")}
    environment |= {"LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib")}  # Linux' loader reads /proc for it

    def run(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
        command = [*UNSHARE, "sh", "-c", HIDE, "sh", python, *words]
        return subprocess.run(
            list(map(str, command)), cwd=tree, env=environment | more, capture_output=True, text=True, timeout=900
        )

    return run


def lost(result: subprocess.CompletedProcess[str], report: Path) -> list[str]:
    """The tests of a run that did not get their points, with what was said."""
    assert report.exists(), result.stdout + result.stderr
    tests = json.loads(report.read_text())["tests"]
    return [f"{test['id']}: {test['message']}" for test in tests if test["points"] < test["max_points"]]


@pytest.mark.parametrize("call", [
    "import os; os.sched_getaffinity(0)",
    "import os; os.listdir('/proc/self/fd')",
    "import ctypes; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)",
    "import os; os.pidfd_open(os.getpid())",
    "import signal; signal.sigtimedwait([], 0)",
    "import socket; socket.TCP_INFO",
    "import select; select.epoll()",
])  # fmt: skip
def test_a_call_that_only_linux_has_fails_on_the_stand_in(laptop, call):
    assert laptop("-c", call).returncode == 1


@pytest.mark.medium
def test_two_workers_train_and_their_timelines_are_compared(laptop, tmp_path):
    flags = ["--max_steps", 4, "--dropout", 0, "--timeline", 1, "--output_dir", tmp_path / "run"]

    result = laptop("-m", "cluster.launch", "--workers", 2, "task2b_allreduce/run_glue.py", *flags)

    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"run/rank{rank}.json").read_text()) for rank in range(2))
    assert len(first["iterations"]) == len(second["iterations"]) == 4 and first["timeline"]["steps"]


@pytest.mark.medium
def test_strategies_are_compared_where_the_system_does_not_tell_what_a_step_needs(laptop, tmp_path):
    words = ["--workers", 2, "--strategies", "ddp,fsdp", "--max_steps", 5, "--length", 16]

    result = laptop(ROOT / "benchmark/compare.py", *words, "--output_dir", tmp_path / "run")

    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert sorted(row["strategy"] for row in rows) == ["ddp", "ddp again", "fsdp", "single"]
    assert {(row["gradient"], row["peak_bytes"]) for row in rows} == {("ok", None)}


@pytest.mark.medium
@pytest.mark.parametrize(("region", "more"), [("2b.1", {}), ("2b.2", {"STAND_IN_FORK": "fails"})])
def test_a_solved_region_has_all_points_where_fork_works_and_where_it_does_not(laptop, tmp_path, region, more):
    report = tmp_path / "report.json"

    result = laptop("-m", "pytest", "-q", "--region", region, "--report", report, **more)

    assert lost(result, report) == [], result.stdout


@pytest.mark.proof
def test_all_solved_regions_have_all_points(laptop, tmp_path):
    result = laptop("-m", "pytest", "-q", "--report", tmp_path / "report.json")

    assert lost(result, tmp_path / "report.json") == []


@pytest.mark.proof
def test_ranks_that_are_spawned_give_the_points_that_forked_ones_give(tmp_path):
    write_files(solved_handout(), tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "--start-method", "spawn", "--report", tmp_path / "report.json"]

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)

    assert lost(result, tmp_path / "report.json") == []


@pytest.mark.proof
def test_runs_become_a_report_and_an_archive(laptop):
    for script, more in (
        ("task1_single/run_glue.py", ()),
        ("task2b_allreduce/run_gpt2.py", ("--batch_size", 8)),
        ("task4_traffic/run_glue.py", ("--world_size", 1)),
    ):
        result = laptop(script, "--max_steps", 2, "--master_port", free_port(), *more)
        assert result.returncode == 0, result.stderr

    report, archive = laptop("submit.py", "report"), laptop("submit.py", "pack", *STUDENT)

    assert report.returncode == 0, report.stderr
    assert archive.returncode == 0, archive.stdout + archive.stderr


def test_no_two_names_differ_only_by_case():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert len({name.lower() for name in names}) == len(names)
