"""The grader's end of one rank: its connection, what it prints, and what is known of its end."""

import os
import socket

from grader.ranks.outcome import Failure
from grader.wire import values
from grader.wire.processes import PER_RANK

MAX_OUTPUT = 100_000  # bytes kept of each rank's stdout, and as many of its stderr


class Output:
    """What a rank writes to one pipe; only the beginning is kept."""

    def __init__(self, fd: int) -> None:
        self.fd, self.kept = fd, bytearray()
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Take what is there. Return False if there is nothing, now or for good."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        self.kept += data[: MAX_OUTPUT - len(self.kept)]
        return bool(data)

    def text(self) -> str:
        return self.kept.decode(errors="replace")


class RankProcess:
    """A rank's process as the grader sees it: the connection to it, its output, and what is known of its end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection, self.rank_end = socket.socketpair()
        self.connection.setblocking(False)
        pipes = [os.pipe() for _ in range(PER_RANK - 1)]
        self.stdout, self.stderr, self.stack = (Output(read) for read, _ in pipes)
        self.rank_fds = [self.rank_end.fileno(), *(write for _, write in pipes)]
        self.frames = values.Frames()
        self.outgoing = bytearray()
        self.listening = True
        self.ending = ""  # the kind of its last message: "returned" or "raised"
        self.value: object = None
        self.error: Failure | None = None
        self.never_waited: list[int] = []
        self.code: int | None = None  # exit code once it has ended, negative for a signal

    @property
    def outputs(self) -> tuple[Output, ...]:
        return self.stdout, self.stderr, self.stack

    def give_away(self) -> None:
        """Close the rank's ends of all pipes: they now belong to the zygote."""
        self.rank_end.close()
        for fd in self.rank_fds[1:]:
            os.close(fd)
        self.rank_fds = []

    def close(self) -> None:
        if self.rank_fds:
            self.give_away()
        self.connection.close()
        for output in self.outputs:
            os.close(output.fd)
