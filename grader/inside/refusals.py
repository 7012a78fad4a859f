"""Refuses a debugger to a student's code, with a helpful message, and lets a DataLoader start no processes.

This is no protection: student code shares this process and can change all of it. The kernel protects (staff/sandbox).
"""

import bdb
import functools
import inspect
import sys

from torch.utils.data import DataLoader

NO_DEBUGGER = "a debugger cannot use the terminal while the graders run"
OF_WORKERS = {
    "num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers"
}  # fmt: skip


def install() -> None:
    """Set both, once for all ranks that are forked from this process."""
    sys.breakpointhook = refuse_debugger
    load_in_one_process()


def load_in_one_process() -> None:
    """Let every DataLoader have num_workers=0 from now on: in the sandbox no rank may start a process."""
    init = DataLoader.__init__

    @functools.wraps(init)
    def without_workers(self: object, *arguments: object, **keywords: object) -> None:
        given = inspect.signature(init).bind(self, *arguments, **keywords)
        if given.arguments.get("num_workers"):
            print("note: the graders load data with num_workers=0", file=sys.stderr)
            for name in OF_WORKERS & given.arguments.keys():
                del given.arguments[name]
        init(*given.args, **given.kwargs)

    setattr(DataLoader, "__init__", without_workers)  # noqa: B010 (mypy: a method is not assigned to)


def refuse_debugger(*_arguments: object, **_keywords: object) -> None:
    """Raise instead of breakpoint(): a rank has no terminal, so pdb would quit without a word."""
    raise bdb.BdbQuit(NO_DEBUGGER)
