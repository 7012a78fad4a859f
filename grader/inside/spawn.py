"""Starts ranks as new processes, where a process that has loaded torch cannot fork: on some versions of macOS.

A new process loads torch for a second or two. So some are started ahead, while the run before computes:

    zygote    Spares.take(start, descriptors) ──────> a spare has loaded torch; it loads what this run needs beyond,
              waits until it is ready         <────── says so, and becomes that rank
"""

import os
import signal
import socket
import sys
import time
from functools import partial
from types import ModuleType

from grader.inside import preload
from grader.inside.checkout import ROOT
from grader.inside.new_rank import become_rank, isolate, limit_memory, prepare_to_be_measured
from grader.wire import values
from grader.wire.processes import PER_RANK
from grader.wire.values import Fields

AHEAD = 4  # as many ranks as most runs have
PROBE_SECONDS = 10
CODE = "import sys; sys.path.append(sys.argv[1]); from grader.inside.spawn import main; main(int(sys.argv[2]))"
CONNECTION = 3  # the descriptor of a spare's connection to the zygote


def can_fork() -> bool:
    """Return whether a forked child can multiply and differentiate. Torch must be loaded.

    With some of Apple's frameworks loaded, such a child hangs or is killed.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            import torch

            x = torch.ones(64, 64, requires_grad=True)
            (x @ x).sum().backward()
            code = 0 if x.grad is not None else 1
        finally:
            os._exit(code)
    limit = time.monotonic() + PROBE_SECONDS
    while time.monotonic() < limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


class Spares:
    """Processes that load torch, or have loaded it, and wait to become a rank; by process id."""

    def __init__(self) -> None:
        self.connections: dict[int, socket.socket] = {}

    def fill(self, number: int = AHEAD) -> None:
        """Start as many as are missing."""
        while len(self.connections) < number:
            own_end, spare_end = socket.socketpair()
            with spare_end:
                command = [sys.executable, "-P", "-c", CODE, ROOT, str(CONNECTION)]
                to_connection = (os.POSIX_SPAWN_DUP2, spare_end.fileno(), CONNECTION)
                pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=[to_connection])
            self.connections[pid] = own_end

    def take(self, starts: list[Fields], descriptors: list[list[int]]) -> list[int]:
        """Let a spare become each of these ranks; return their process ids once all are ready."""
        self.fill(len(starts))
        taken = [(pid, self.connections.pop(pid)) for pid in list(self.connections)[: len(starts)]]
        for (_, connection), start, own in zip(taken, starts, descriptors, strict=True):
            connection.sendall(values.pack(start))
            socket.send_fds(connection, [b"."], own)
        for _, connection in taken:
            with connection:
                connection.recv(1)
        self.fill()
        return [pid for pid, _ in taken]

    def forget(self, pid: int) -> None:
        """Close the connection to a spare that has ended."""
        if pid in self.connections:
            self.connections.pop(pid).close()


def leave_out_compiler() -> None:
    """Let no optimizer import torch's compiler at its first step, only to keep it away from the step: 0.7 s a rank."""
    sys.modules["torch._compile"] = module = ModuleType("torch._compile")
    vars(module)["_disable_dynamo"] = lambda function=None, recursive=True: function or (lambda other: other)


def main(descriptor: int) -> None:
    """Be a spare, then a rank."""
    connection = socket.socket(fileno=descriptor)
    sys.path.remove(ROOT)  # a student's `common` must not be found beside the grader's
    leave_out_compiler()
    preload.load(preload.FIRST)
    sys.dont_write_bytecode = True
    try:
        start = values.receive(connection)
    except (EOFError, ConnectionError):
        return  # the zygote has ended
    _, descriptors, _, _ = socket.recv_fds(connection, 1, PER_RANK)
    for group in start["preload"]:
        if group != "steps" or start["measures"]:  # it is that compiler, and what takes memory at the first step
            preload.load(group)
    connection.sendall(b".")
    if start["measures"]:
        prepare_to_be_measured()
    limit_memory()
    alone = partial(isolate, start["rank"], start["folder"], (), start["measures"], lambda *_: None)
    become_rank(alone, start["terminal"], *descriptors)
