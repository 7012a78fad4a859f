"""Runs a function on several ranks, in processes of their own, and returns how each of them ended.

    result = ranks.run(request, tree=folder)     # grader/session.py, runs in the grader
    result.values              # what the function returned on each rank; raises RuntimeError with the reason otherwise
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
from grader.ranks.outcome import Result
from grader.ranks.zygote_process import ZygoteProcess
from grader.wire.request import Request
from grader.wire.values import Fields

MAX_RANKS = 8


class Starter:
    """Owns this process's zygote: starts it when it is needed, and ends it with the process."""

    def __init__(self) -> None:
        self.zygote: ZygoteProcess | None = None
        self.start_method = ""  # of ranks: "fork", "spawn", or "" for fork where that works
        self.lasts = False  # whether one zygote serves all pytest runs of this process

    def start(self) -> None:
        """Begin to load torch in the zygote; returns at once. Calling it is optional."""
        if self.zygote is not None and self.zygote.process.poll() is not None:
            self.stop()  # it was killed
        if self.zygote is None:
            self.zygote = ZygoteProcess(self.start_method)
            atexit.register(self.stop)

    def stop(self) -> None:
        """End the zygote; the next run starts another."""
        if self.zygote is not None:
            self.zygote.close()
            self.zygote = None
            atexit.unregister(self.stop)

    def run(
        self,
        request: Request,
        *,
        tree: str | Path = ROOT,
        given: Fields | None = None,
        debug: Debug | None = None,
    ) -> Result:
        """Run a function on as many ranks as there are inputs, and wait for all.

        `tree` holds the student's files. `given`: the tree's common/, if it is as it was given out, and ranks start
        with it, see grader/given_files.py. When this returns, every process of the ranks is gone. Whatever the
        student's code does is in the result; an exception from here is a mistake of the grader.
        """
        if not 1 <= len(request.inputs) <= MAX_RANKS:
            raise ValueError(f"a run has from 1 to {MAX_RANKS} ranks, got {len(request.inputs)}")
        self.start()
        assert self.zygote is not None
        self.zygote.wait_until_ready()
        try:
            with contextlib.closing(RankRun(self.zygote, request, str(Path(tree).resolve()), given, debug)) as current:
                return current.result()
        except BaseException:  # Ctrl-C, too
            self.stop()  # whatever state the zygote was in, its end takes all ranks with it
            raise


STARTER = Starter()  # one for each process that grades
run, start, stop = STARTER.run, STARTER.start, STARTER.stop
