"""Runs pdb inside one rank, in the terminal of `python -m grader.debug`. The other ranks run as always."""

import pdb
import sys
from collections.abc import Callable, Iterable
from typing import Any

STOPPED = "stopped in the debugger"


def prepare(rank: int, stops: Iterable[tuple[str, int]] | None, tell: Callable[[str], None]) -> None:
    """Let breakpoint() and pdb.set_trace() stop in the debugged rank, and do nothing in the others, which get None."""
    if stops is None:
        sys.breakpointhook = pdb.set_trace = _run_on
    else:
        debugger = Debugger(rank, tell)
        sys.breakpointhook = pdb.set_trace = debugger.hook
        debugger.stop_at((file, line) for file, line in stops)


def _run_on(*_arguments: object, **_keywords: object) -> None:
    """Do nothing: the breakpoint() of ranks that nobody debugs."""


class Debugger(pdb.Pdb):
    """pdb that says once that it has stopped, and whose q ends the rank without asking."""

    def __init__(self, rank: int, tell: Callable[[str], None]) -> None:
        super().__init__(nosigint=True)
        self.prompt = f"(Pdb, rank {rank}) "
        self.tell = tell

    def stop_at(self, lines: Iterable[tuple[str, int]]) -> None:
        """Stop the first time when each of these lines (file, number) is reached; the code up to there runs on."""
        for file, line in lines:
            self.set_break(file, line, temporary=True)
        if self.breaks:
            self.reset()
            self.botframe = sys._getframe()
            self.set_continue()
            sys.settrace(self.trace_dispatch)

    def hook(self, *_arguments: object, **_keywords: object) -> None:
        """Stop in the caller: the breakpoint() of the debugged rank."""
        self.set_trace(sys._getframe(1))

    def interaction(self, *arguments: Any, **keywords: Any) -> None:
        self.tell(STOPPED)
        super().interaction(*arguments, **keywords)
        self.curframe_locals = {}  # pdb keeps them, and with them the objects whose end a test may wait for

    def do_quit(self, arg: str) -> bool:
        """End this rank, and with it the run: q(uit)."""
        self.set_quit()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:  # noqa: N802 (pdb's name)
        """Do the same as q: Ctrl-D."""
        self.message("")
        return self.do_quit(arg)
