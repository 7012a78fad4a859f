"""Trains the small job in real processes on gloo and kills some of them; a script, so that torch is loaded only once.

    python staff/tests/beyond/killed_ranks.py FOLDER < SCENARIOS

Of each scenario, a list of attempts, it prints one line of JSON. An attempt is (ranks, victim, n): the victim is killed
before its n-th put or delete, or nobody where n is 0. FOLDER/SCENARIO.ATTEMPT is what the attempt has left.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from beyond.run_survive import KilledFolder, ReportingJob
from beyond.survive import load, train

STEPS, EVERY, SEED = 12, 4, 7
DEADLINE = 60.0  # seconds for an attempt, which takes less than one


class LoggingJob(ReportingJob):
    """Writes the examples of every update to a file, one line each; an interrupted step does not count."""

    def __init__(self, log: Path) -> None:
        super().__init__(0.0, SEED)
        self.log = log.open("w", buffering=1)

    def gradient(self, values, examples):
        self.examples = examples
        return super().gradient(values, examples)

    def update(self, state, gradient):
        super().update(state, gradient)
        self.log.write(json.dumps([state.step, self.examples]) + "\n")


def rank_main(rank: int, ranks: int, storage: Path, log: Path, kill: int) -> None:
    """Train as one rank; at the end, write all parameters."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's complaints about a dead peer
    os.dup2(os.open(f"{log}.out.{rank}", os.O_WRONLY | os.O_CREAT), 1)
    job, code = LoggingJob(Path(f"{log}.{rank}")), 1
    try:
        dist.init_process_group("gloo", store=dist.FileStore(f"{log}.store", ranks), rank=rank, world_size=ranks)
        code = train(KilledFolder(str(storage), kill), job, STEPS, EVERY)
        if not code:
            values = job.gather(load(KilledFolder(str(storage), 0))).tolist()
            Path(f"{log}.values.{rank}").write_text(json.dumps(values))
    finally:
        os._exit(code)


def attempt(ranks: int, victim: int, kill: int, storage: Path, log: Path) -> dict:
    """Return the exit code of every rank (negative for a signal, None for one that hangs), and its updates."""
    pids = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            rank_main(rank, ranks, storage, log, kill if rank == victim else 0)
        pids.append(pid)
    codes, until = dict.fromkeys(pids), time.monotonic() + DEADLINE
    while None in codes.values() and time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.005)
    for pid in (pid for pid, code in codes.items() if code is None):
        os.kill(pid, 9)
    updates = [[json.loads(line) for line in Path(f"{log}.{rank}").read_text().splitlines()] for rank in range(ranks)]
    return {"codes": list(codes.values()), "updates": updates}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(sys.argv[1])
    for number, scenario in enumerate(json.load(sys.stdin)):
        storage, results = folder / f"storage{number}", []
        for i, (ranks, victim, kill) in enumerate(scenario):
            storage.mkdir(exist_ok=True)
            results.append(attempt(ranks, victim, kill, storage, folder / f"log{number}.{i}"))
            shutil.copytree(storage, folder / f"{number}.{i}")
        print(json.dumps(results), flush=True)
