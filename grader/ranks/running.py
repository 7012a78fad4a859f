"""Run a probe on several ranks, in processes of their own, and hear how each of them ended.

    # grader/probes_task2b.py, runs in each rank
    def gradients(context):
        task = context.load("task2b_allreduce/run_glue.py")
        context.join()
        model = torch.nn.Linear(2, 1)
        model.weight.grad = context.arguments["grads"][context.rank]
        task.sync_gradients(model, context.world_size)
        return model.weight.grad

    # tests/test_task2b.py, runs in the grader
    result = ranks.run("grader.probes_task2b:gradients", 4, {"grads": grads}, deadline=20, tree=folder)
    result.values              # what the probe returned on each rank; raises RunError with the reason otherwise
    result.outcome             # returned, raised, killed, exited, mismatch, deadlock or deadline
    result.explain()           # deadlock: rank 0 waits in scatter #2 (task/run_glue.py:88); ranks 1-3 wait in ... (:85)
    result.ranks[1].calls      # its collectives in order: name, number, shape, dtype, sent, received, root, where, ...
    result.ranks[1].events     # the same with the spies' events between them
    result.ranks[1].stdout     # the first 100 kB

The process that calls this never imports a student's file. The ranks are forked by a zygote, which is started at the
first run (or by `start`, to load torch while pytest collects) and lives as long as this process.
"""

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.paths import ROOT
from grader.inside.zygote import kill_all
from grader.ranks.one_run import Run
from grader.ranks.outcome import RankResult, Result, RunError
from grader.wire import values

__all__ = ["RankResult", "Result", "RunError", "run", "start", "stop"]

MAX_RANKS = 8
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
ENVIRONMENT = ONE_THREAD | {
    "CUDA_VISIBLE_DEVICES": "",  # a CUDA context does not survive a fork, and grading must not depend on the machine
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
NOT_INHERITED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "PYTHONSTARTUP"}


class ZygoteProcess:
    """The grader's end of its zygote."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        code = "import sys; sys.path.append(sys.argv[1]); from grader.inside.zygote import main; main(int(sys.argv[2]))"
        environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        self.mark = secrets.token_hex(16)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(ROOT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment | ENVIRONMENT | {"COS598D_RANKS": self.mark},
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        self.ready = False

    def request(self, **message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # if it has died, `receive` says so
            self.control.sendall(values.pack(message))

    def receive(self) -> dict:
        try:
            return values.receive(self.control)
        except (EOFError, ConnectionError):
            self.errors.seek(0)
            reason = self.errors.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"the process that starts the ranks has died: {reason or 'no message'}") from None

    def wait_until_ready(self) -> None:
        if not self.ready:
            self.ready = self.receive()["kind"] == "ready"

    def close(self) -> None:
        self.control.close()
        if self.ready:  # before that it has started no rank, and would load torch to its end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.process.kill()
        self.process.wait()
        self.kill_marked()
        self.errors.close()

    def kill_marked(self) -> int:
        """Kill what outlives a killed zygote. Returns how many there were."""
        return len(set().union(*(kill_all(self._marked) for _ in range(10))))  # see kill_all: one look can miss one

    def _marked(self) -> Iterator[int]:
        """The processes that carry our mark in the environment they, or who they were forked from, started with."""
        for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    yield pid


_zygote: ZygoteProcess | None = None


def start() -> None:
    """Begin to load torch in the zygote; returns at once. Calling it is optional."""
    global _zygote
    if _zygote is not None and _zygote.process.poll() is not None:
        stop()  # it was killed
    if _zygote is None:
        _zygote = ZygoteProcess()
        atexit.register(stop)


def stop() -> None:
    """End the zygote; the next run starts another."""
    global _zygote
    if _zygote is not None:
        _zygote.close()
        _zygote = None
        atexit.unregister(stop)


def run(
    probe: str,
    world_size: int,
    arguments: dict[str, Any] | None = None,
    *,
    deadline: float = 30.0,
    tree: str | Path = ROOT,
    keep_payloads: bool = False,
) -> Result:
    """Run `probe` ("module:function", see grader/inside/context.py) on ranks 0 to world_size - 1, and wait for all of them.

    `arguments` are numbers, strings, lists, dicts and arrays; `tree` holds the student's files; `deadline` is in
    seconds from the fork. When this returns, every process of the ranks is gone. Whatever the student's code does is
    in the result; an exception from here is a mistake of the grader's.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size must be from 1 to {MAX_RANKS}, got {world_size}")
    job = {"probe": probe, "arguments": arguments or {}, "tree": str(Path(tree).resolve())}
    start()
    assert _zygote is not None
    _zygote.wait_until_ready()
    try:
        with contextlib.closing(Run(_zygote, job, world_size, deadline, keep_payloads)) as current:
            return current.result()
    except BaseException:
        stop()  # whatever state the zygote was in, its end takes all ranks with it
        raise
