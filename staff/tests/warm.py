"""Start a task script from a process that has loaded torch and transformers: five seconds of a core less for each.

For tests of what scripts do together, not of how one starts: every script is a process of its own, with its own command
line, folder and output, but it is forked from a fork server, which has imported all and computed nothing.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

LOADED = [
    "torch.distributed",
    "torch._dynamo",  # any optimizer imports it at its first step
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Script:
    """A running script, with the methods of subprocess.Popen that tests of workers need."""

    def __init__(
        self, path: Path, words: Sequence[object], log: Path, environment: Mapping[str, str] = ENVIRONMENT
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        arguments = (str(path), [str(word) for word in words], str(log), ENVIRONMENT | dict(environment))
        self.process = context.Process(target=_run, args=arguments)
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code; raises TimeoutError."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"still running after {timeout} s")
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


def _run(path: str, words: list[str], log: str, environment: dict[str, str]) -> None:
    """In the forked process: what `python path words` does, from the script's own folder."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    os.chdir(Path(path).parent)
    sys.argv, sys.path[0] = [Path(path).name, *words], str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")
