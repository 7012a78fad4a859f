"""Any command may be the first one in a fresh clone, and any of its ranks may be the first to find the cache empty."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.launch import free_port
from common.data import sample_data
from common.models import tiny
from common.paths import ROOT, locked
from tests.own.warm import Script


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# A command that several workers start, and the tiny model that it needs.
ENTRY_POINTS = {
    "-m benchmark.compare --only ddp --max_steps 4": "gpt2",
    "-m benchmark.run --max_steps 3 --dropped 1": "gpt2",
    "-m benchmark.accounting --only ddp": "gpt2",
    "task2a_gather_scatter/run_glue.py --max_steps 1": "bert",
    "task2b_allreduce/run_glue.py --max_steps 1": "bert",
    "task3_ddp/run_glue.py --max_steps 1": "bert",
    "task3_ddp/run_gpt2.py --max_steps 1 --batch_size 4": "gpt2",
    "task4_traffic/run_glue.py --max_steps 1": "bert",
    "pipeline/run_gpt2.py --schedule gpipe --max_steps 1 --batch_size 4": "gpt2",
}


def _mark(command: str, first: int) -> pytest.MarkDecorator:
    """Rank 1 first is the harder case: transformers saves a model on rank 0 alone."""
    price = {"task2b_allreduce/run_glue": "medium" if first else "proof", "-m benchmark.compare": "proof"}
    return getattr(pytest.mark, next((name for start, name in price.items() if command.startswith(start)), "slow"))


CASES = [pytest.param(*case, marks=_mark(*case)) for case in itertools.product(ENTRY_POINTS, (0, 1))]


@pytest.mark.parametrize("command, first", CASES)
def test_an_entry_point_is_the_first_command_whichever_rank_finds_the_cache_empty(cache, tmp_path, command, first):
    if "benchmark" in command:
        pytest.importorskip("tensorboard")
    lock = cache / "models" / f"tiny-{ENTRY_POINTS[command]}-v{tiny.VERSION}-{sample_data.VERSION}.lock"
    lock.parent.mkdir(parents=True)
    place = ["--master_ip", "127.0.0.1", "--master_port", str(free_port()), "--world_size", "2", "--local_rank"]
    words = [*command.split(), "--output_dir", str(tmp_path / "run"), *place]
    own = {"COS598D_CACHE": str(cache), "COS598D_MARK": str(tmp_path)}
    ranks = []
    try:
        with locked(lock.with_suffix("")):  # no rank passes before both are here
            for rank in range(2):
                ranks.append(_start([*words, str(rank)], tmp_path / f"out{rank}", tmp_path / f"err{rank}", own))
            for rank in ranks:
                _wait(lambda rank=rank: rank.poll() is not None or _has_open(rank.pid, lock))
            ranks[1 - first].send_signal(signal.SIGSTOP)
            _wait(lambda: ranks[1 - first].poll() is not None or _state(ranks[1 - first].pid) == "T")
        _wait(lambda: ranks[first].poll() is not None or (lock.with_suffix("") / "complete.json").exists())
        ranks[1 - first].send_signal(signal.SIGCONT)
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()

    errors = [(tmp_path / f"err{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], errors
    assert " is damaged (" not in "".join(errors)
    if "benchmark" in command:  # rank 0 prints the table, and one JSON object as the last line
        assert json.loads((tmp_path / "out0").read_text().splitlines()[-1])


def _start(words: list[str], out: Path, err: Path, own: dict[str, str]) -> "subprocess.Popen | Script":
    """A script of make test is forked from a process that has loaded torch; both of its streams go to `err`."""
    if words[0].startswith("task2b_allreduce/run_glue"):
        return Script(ROOT / words[0], words[1:], err, own)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | own
    with open(out, "w") as stdout, open(err, "w") as stderr:
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)


def _wait(condition) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process has the file open: it waits for the lock, or will."""
    with contextlib.suppress(OSError):
        return any(os.path.realpath(fd) == str(path) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
