"""Starts the processes of a student's code in a rank: they begin as with forkserver.

A process of forkserver begins without the memory of its parent: target and arguments are pickled, the file is imported
again, and the environment is that of the first start. Here children are forked, which is quicker, and then made to
begin in the same way.
"""

import os
import pickle
from collections.abc import Callable
from functools import cache
from multiprocessing import context as contexts
from multiprocessing import popen_fork
from multiprocessing.reduction import ForkingPickler
from types import ModuleType


class NotPicklableError(TypeError):
    """An object that fork would pass on and forkserver cannot."""


class _Fresh:
    """A process that begins with its pickle alone; it is started in place of a multiprocessing.Process.

    It is pickled now, in its parent. begin_again: called in the child, before it unpickles.
    """

    def __init__(self, process: object, environment: dict[str, str], begin_again: Callable[[], None]) -> None:
        self._environment, self._begin_again = environment, begin_again
        contexts.set_spawning_popen(self)  # type: ignore[arg-type] # locks and queues can be pickled only in a start
        try:
            self._pickled = bytes(ForkingPickler.dumps(process))
        except Exception as error:  # whatever a student's objects raise while they are pickled
            raise NotPicklableError(
                "this Process cannot be started by the script: forkserver pickles target and arguments, so use a "
                f"top-level function of the file, not a lambda or a nested function ({error})"
            ) from None
        finally:
            contexts.set_spawning_popen(None)

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.environ.clear()
        os.environ.update(self._environment)
        self._begin_again()
        return pickle.loads(self._pickled)._bootstrap(parent_sentinel=parent_sentinel)


def start_afresh(lesson: ModuleType, prepare: Callable[[], None] = lambda: None) -> None:
    """Let forkserver and spawn fork children from now on. A child runs the file `lesson` again, and then `prepare`."""

    def begin_again() -> None:
        kept = {name: value for name, value in vars(lesson).items() if name.startswith("__")}
        vars(lesson).clear()  # what the parent has left in its globals is gone
        vars(lesson).update(kept)
        assert lesson.__spec__ and lesson.__spec__.loader, "loaded by a context"
        lesson.__spec__.loader.exec_module(lesson)
        prepare()

    def popen(environment: Callable[[], dict[str, str]]) -> object:
        return staticmethod(lambda process: popen_fork.Popen(_Fresh(process, environment(), begin_again)))  # type: ignore

    now = os.environ.copy  # a plain dictionary; cached, it is that of the first start
    setattr(contexts.ForkServerProcess, "_Popen", popen(cache(now)))  # noqa: B010 (mypy: it is a method)
    setattr(contexts.SpawnProcess, "_Popen", popen(now))  # noqa: B010
