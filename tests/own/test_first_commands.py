"""Any script may be the first one in a fresh clone, and any of its ranks may be the first to find the cache empty."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from cluster.launch import free_port
from common.data import sample_data
from common.models import tiny
from common.paths import ROOT, locked
from tests.own.started_processes import wait_for
from tests.own.warm import Script

GLUE = ("task2b_allreduce/run_glue.py", "bert")
GPT2 = ("task3_ddp/run_gpt2.py", "gpt2")


@pytest.mark.parametrize(
    "script, kind, first",
    [
        pytest.param(*GLUE, 1, marks=pytest.mark.medium),
        pytest.param(*GLUE, 0, marks=pytest.mark.proof),
        pytest.param(*GPT2, 1, marks=pytest.mark.proof),
    ],
)
def test_a_script_is_the_first_command_whichever_rank_finds_the_cache_empty(tmp_path, script, kind, first):
    cache = tmp_path / "cache"
    lock = cache / "models" / f"tiny-{kind}-v{tiny.VERSION}-{sample_data.VERSION}.lock"
    lock.parent.mkdir(parents=True)
    place = ["--master_ip", "127.0.0.1", "--master_port", str(free_port()), "--world_size", "2", "--local_rank"]
    words = ["--max_steps", "1", "--output_dir", tmp_path / "run", *place]
    own, ranks = {"COS598D_CACHE": str(cache)}, list[Script]()
    try:
        with locked(lock.with_suffix("")):  # no rank passes before both are here
            ranks = [Script(ROOT / script, [*words, rank], tmp_path / f"log{rank}", own) for rank in range(2)]
            for rank in ranks:
                wait_for(lambda rank=rank: rank.poll() is not None or _has_open(rank.pid, lock), "both at the lock")
            other = ranks[1 - first]
            other.send_signal(signal.SIGSTOP)
            wait_for(lambda: other.poll() is not None or _state(other.pid) == "T", "one to stop")
        complete = lock.with_suffix("") / "complete.json"
        wait_for(lambda: ranks[first].poll() is not None or complete.exists(), "the model")
        other.send_signal(signal.SIGCONT)
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()

    logs = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], logs
    assert " is damaged (" not in "".join(logs)


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process has the file open: it waits for the lock, or will."""
    with contextlib.suppress(OSError):
        return any(os.path.realpath(fd) == str(path) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
