"""Runs a probe on several ranks, in processes of their own, and returns how each of them ended.

    # a probe, much shortened; runs in each rank
    def average(context):
        lesson = context.load("lesson.py")
        context.join()
        model = torch.nn.Linear(2, 1)
        model.weight.grad = context.arguments["grads"][context.rank]
        lesson.average_gradients(model)
        return model.weight.grad

    # grader/session.py, runs in the grader
    result = ranks.run("package.module:average", 4, {"grads": grads}, deadline=20, tree=folder)
    result.values              # what the probe returned on each rank; raises RunError with the reason otherwise
    result.outcome             # returned, raised, killed, exited, mismatch, deadlock or deadline
    result.explain()           # deadlock: rank 0 waits in scatter #2 (lesson.py:88); ranks 1-3 wait in ... (:85)
    result.ranks[1].calls      # its collectives in order: name, number, shape, dtype, sent, received, root, where, ...
    result.ranks[1].events     # the same with the spies' events between them
    result.ranks[1].stdout     # the first 100 kB

The process that calls this never imports a student's file. The ranks are forked by a zygote, which is started at the
first run (or by `start`, to load torch while pytest collects) and lives as long as this process.
"""

import atexit
import contextlib
from pathlib import Path

from common.paths import ROOT
from grader.ranks.one_run import Debug, RankRun
from grader.ranks.outcome import RankResult, Result, RunError
from grader.ranks.zygote_process import ZygoteProcess
from grader.wire.values import Fields

__all__ = ["RankResult", "Result", "RunError", "run", "start", "stop"]

MAX_RANKS = 8


class Starter:
    """Owns this process's zygote: starts it when it is needed, and ends it with the process."""

    def __init__(self) -> None:
        self.zygote: ZygoteProcess | None = None

    def start(self) -> None:
        """Begin to load torch in the zygote; returns at once. Calling it is optional."""
        if self.zygote is not None and self.zygote.process.poll() is not None:
            self.stop()  # it was killed
        if self.zygote is None:
            self.zygote = ZygoteProcess()
            atexit.register(self.stop)

    def stop(self) -> None:
        """End the zygote; the next run starts another."""
        if self.zygote is not None:
            self.zygote.close()
            self.zygote = None
            atexit.unregister(self.stop)

    def take(self) -> ZygoteProcess | None:
        """Take the zygote out of the way of a `stop`, to be put back with `put`."""
        zygote, self.zygote = self.zygote, None
        return zygote

    def put(self, zygote: ZygoteProcess | None) -> None:
        """Put back the zygote that `take` returned."""
        self.zygote = zygote or self.zygote

    def run(
        self,
        probe: str,
        world_size: int,
        arguments: Fields | None = None,
        *,
        deadline: float = 30.0,
        tree: str | Path = ROOT,
        keep_payloads: bool = False,
        given: Fields | None = None,
        debug: Debug | None = None,
    ) -> Result:
        """Run `probe` ("module:function", see grader/inside/context.py) on ranks 0 to world_size - 1, and wait for all.

        `arguments` are numbers, strings, lists, dicts and arrays; `tree` holds the student's files; `deadline` is in
        seconds from the fork. `given`: the tree's common/, if it is as it was given out, and ranks start with it, see
        grader/given_files.py. When this returns, every process of the ranks is gone. Whatever the student's code does
        is in the result; an exception from here is a mistake of the grader.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be from 1 to {MAX_RANKS}, got {world_size}")
        job = {"probe": probe, "arguments": arguments or {}, "tree": str(Path(tree).resolve())}
        self.start()
        assert self.zygote is not None
        self.zygote.wait_until_ready()
        try:
            with contextlib.closing(
                RankRun(self.zygote, job, world_size, deadline, keep_payloads, given, debug)
            ) as current:
                return current.result()
        except BaseException:
            self.stop()  # whatever state the zygote was in, its end takes all ranks with it
            raise


STARTER = Starter()  # one for each process that grades
run, start, stop = STARTER.run, STARTER.start, STARTER.stop
