"""Small programs to launch as ranks, the fixture `stub` that writes one, how to launch it, and an `ssh`."""

import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from staff.tests.cluster.started_processes import processes_with, run

# Each finds its rank as the last word. `wait_for_all` returns when all ranks are there, `wait_for_end_of` when one is
# there no more.
STUBS = {
    "shows": "print(json.dumps(sys.argv[1:])); print('threads', os.environ['OMP_NUM_THREADS'])",
    "rank_2_fails": """
        wait_for_all()
        if rank == '2':
            raise RuntimeError('the reason')
        signal.pause()
        """,
    "all_fail_alike": "raise SystemExit('error: the same everywhere')",
    "rank_0_stops_because_of_rank_2": """
        wait_for_all()
        if rank == '0':
            os._exit(3)
        if rank == '2':
            wait_for_end_of(0)
            os._exit(7)
        signal.pause()
        """,
    "rank_0_ends_first": """
        wait_for_all()
        if rank != '0':
            wait_for_end_of(0)
            print('still working')
        """,
    "stubborn_family": """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ['MARK'] = folder
        subprocess.Popen(['sleep', '1000'])
        subprocess.Popen(['sleep', '1000'], start_new_session=True)
        wait_for_all()
        if 'fail' in sys.argv and rank == '1':
            sys.exit(5)
        while True:
            signal.pause()
        """,
    "endless": "while True: print('a line')",
}
HEAD = """
import json, os, signal, subprocess, sys
rank, world_size, folder = sys.argv[-1], int(sys.argv[sys.argv.index('--world_size') + 1]), os.path.dirname(__file__)
def wait_for_all():
    open(f'{folder}/part-{rank}', 'w').write(str(os.getpid()))
    os.rename(f'{folder}/part-{rank}', f'{folder}/ready-{rank}')
    while not all(os.path.exists(f'{folder}/ready-{r}') for r in range(world_size)):
        pass
def wait_for_end_of(rank):
    while os.path.exists('/proc/' + open(f'{folder}/ready-{rank}').read()):
        pass
"""


@pytest.fixture
def stub(tmp_path):
    """Writes a stub into this test's folder; the folder's name is the mark by which its processes are found."""

    def write(name: str) -> Path:
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(STUBS[name]) + "\n")
        return tmp_path / f"{name}.py"

    yield write
    for pid in processes_with(tmp_path):  # only where the test has failed
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ssh(tmp_path) -> str:
    """Return a command that is used as ssh is, and runs on this machine what it should run on another one."""
    path = tmp_path / "ssh"
    path.write_text('#!/bin/sh\n[ "$1" = -G ] && exec echo "hostname $2"\ncd && exec sh -c "$2"\n')
    path.chmod(0o755)
    return str(path)


def launch(*words, workers: int = 3, **options) -> subprocess.CompletedProcess:
    return run("-m", "cluster.launch", "--workers", str(workers), "--", *words, **options)


def lines_of(rank: int, text: str) -> list[str]:
    return [line.removeprefix(f"[{rank}] ") for line in text.splitlines() if line.startswith(f"[{rank}] ")]
