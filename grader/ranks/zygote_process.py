"""The grader's end of its zygote, the process that forks the ranks."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile

from common.paths import ROOT
from grader.wire import values

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

    def __init__(self, start_method: str = "") -> None:
        self.control, zygote_end = socket.socketpair()
        code = (
            "import sys; sys.path.append(sys.argv[1]); "
            "from grader.inside.zygote import main; main(int(sys.argv[2]), sys.argv[3])"
        )
        environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        with zygote_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(ROOT), str(zygote_end.fileno()), start_method],
                pass_fds=[zygote_end.fileno()],
                env=environment | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                start_new_session=True,  # only the grader handles Ctrl-C
            )
        self.ready = False

    def request(self, **message: object) -> None:
        with contextlib.suppress(ConnectionError):  # if it has died, `receive` says so
            self.control.sendall(values.pack(message))

    def receive(self) -> dict:
        try:
            return values.receive(self.control)
        except (EOFError, ConnectionError):
            self.process.kill()
            self.process.wait()  # the next run asks whether it still lives
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
        self.errors.close()
