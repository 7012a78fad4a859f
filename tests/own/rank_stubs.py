"""Small programs to launch as ranks, the fixture `stub` that writes one, and how to launch it."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.own.started_processes import processes_with, run

# Small programs to launch. Each finds its rank as the last word; those that run on write ready-RANK first.
STUBS = {
    "flags": "print('flags', json.dumps(sys.argv[1:]))",
    "threads": "print('threads', os.environ['OMP_NUM_THREADS'])",
    "bars": """
        from tqdm import tqdm, trange
        for _ in trange(2, desc=f'epochs of rank {rank}'):
            for _ in tqdm(range(5), desc=f'steps of rank {rank}'):
                print('a loss')
        """,
    "rank_2_fails": """
        ready()
        if rank == '2':
            wait_for_all()
            raise RuntimeError('the reason')
        signal.pause()
        """,
    "all_fail_alike": "raise SystemExit('error: the same everywhere')",
    "rank_0_loses_rank_2": """
        ready()
        wait_for_all()
        if rank == '0':
            print('RuntimeError: Connection closed by peer', file=sys.stderr)
            os._exit(1)
        if rank == '2':
            while os.path.exists(f'/proc/{pid_of(0)}'):
                pass
            os._exit(7)
        signal.pause()
        """,
    "rank_1_fails_before_rank_2": """
        ready()
        wait_for_all()
        if rank == '2':
            guard = open(f'/proc/{pid_of(1)}/stat').read().split()[3]  # its parent, which the launcher waits for
            open(f'{folder}/known', 'w').close()
            while os.path.exists(f'/proc/{guard}'):
                pass
        while not os.path.exists(f'{folder}/known'):
            pass
        if rank in '12':
            os._exit(10 + int(rank))
        signal.pause()
        """,
    "rank_2_is_killed": """
        if rank == '0':
            print('comparing the ranks', file=sys.stderr)
        ready()
        wait_for_all()
        if rank == '2':
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == '0':
            while os.path.exists(f'/proc/{pid_of(2)}'):
                pass
            raise SystemExit('where each rank was:\\n  rank 2  died\\nrank 2 died (process 7 on here)')
        signal.pause()
        """,
    "rank_0_ends_first": """
        ready()
        wait_for_all()
        if rank != '0':
            while os.path.exists(f'/proc/{pid_of(0)}'):
                pass
            print('still working')
        """,
    "stubborn_family": """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ['MARK'] = folder
        subprocess.Popen(['sleep', '1000'])
        subprocess.Popen(['sleep', '1000'], start_new_session=True)
        ready()
        if 'fail' in sys.argv and rank == '1':
            wait_for_all()
            sys.exit(5)
        while True:
            signal.pause()
        """,
    "endless": "while True: print('a line')",
}
HEAD = """
import json, os, signal, subprocess, sys
rank, world_size, folder = sys.argv[-1], int(sys.argv[sys.argv.index('--world_size') + 1]), os.path.dirname(__file__)
def ready():
    with open(f'{folder}/part-{rank}', 'w') as file:
        file.write(str(os.getpid()))
    os.rename(f'{folder}/part-{rank}', f'{folder}/ready-{rank}')
def pid_of(rank):
    return int(open(f'{folder}/ready-{rank}').read())
def wait_for_all():
    while not all(os.path.exists(f'{folder}/ready-{r}') for r in range(world_size)):
        pass
"""


@pytest.fixture
def stub(tmp_path):
    """Writes a stub into this test's folder; the folder's name is the mark by which its processes are found."""

    def write(name: str) -> Path:
        lines = STUBS[name].strip("\n").split("\n")
        indent = len(lines[0]) - len(lines[0].lstrip())
        (tmp_path / f"{name}.py").write_text(HEAD + "\n".join(line[indent:] for line in lines) + "\n")
        return tmp_path / f"{name}.py"

    yield write
    for pid in processes_with(tmp_path):  # only where the test has failed
        os.kill(pid, signal.SIGKILL)


def launch(*words, workers: int = 3, **options) -> subprocess.CompletedProcess:
    return run("-m", "cluster.launch", "--workers", str(workers), "--", *words, **options)


def lines_of(rank: int, text: str) -> list[str]:
    return [line.removeprefix(f"[{rank}] ") for line in text.splitlines() if line.startswith(f"[{rank}] ")]
