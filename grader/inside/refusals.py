"""Refuses some things to a student's code, with helpful messages: importing the graders, and a debugger.

This is no protection: student code shares this process and can change all of it. The kernel protects (staff/sandbox),
and judges believe nothing that a rank says about itself; see docs/grading_limits.md.
"""

import functools
import importlib.abc
import inspect
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from torch.utils.data import DataLoader

NO_DEBUGGER = (
    "a debugger cannot use the terminal while the graders run; use `python -m grader.debug REGION --rank RANK` instead"
)
OF_WORKERS = {
    "num_workers",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
}


class NoGraders(importlib.abc.MetaPathFinder):
    """Refuses `import grader`, which works where a student runs the graders and not where they give points."""

    def find_spec(self, fullname: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "grader":
            raise ImportError(f"{fullname} is not for graded code")
        return None


def forget_graders() -> None:
    """Let `import grader` fail from now on; modules that are loaded keep what they have imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "grader"]:
        del sys.modules[name]
    sys.meta_path.insert(0, NoGraders())


def load_in_one_process() -> None:
    """Let every DataLoader have num_workers=0 from now on: in the sandbox no rank may start a process."""
    init = DataLoader.__init__

    @functools.wraps(init)
    def without_workers(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = inspect.signature(init).bind(self, *arguments, **keywords)
        if given.arguments.get("num_workers"):
            print("note: the graders load data with num_workers=0", file=sys.stderr)
            for name in OF_WORKERS & given.arguments.keys():
                del given.arguments[name]
        init(*given.args, **given.kwargs)

    setattr(DataLoader, "__init__", without_workers)  # noqa: B010 (mypy: a method is not assigned to)


def refuse_debugger(*_arguments: object, **_keywords: object) -> None:
    """Raise instead of breakpoint(): a rank has no terminal, so pdb would quit without a word."""
    raise RuntimeError(NO_DEBUGGER)
