"""Messages between two ranks over a TCP connection: what the roll call says, and later where each rank is."""

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from common.workers.machine import own_cores

SEND_SECONDS = 2  # a process that was stopped by Ctrl-Z takes nothing once its buffer is full


@dataclass(frozen=True)
class Process:
    """The process of a rank, its machine and the cores that it may use; by default this process.

    notes: the path of the file in which the rank notes its calls, see pulse.noted_calls; read on the same machine.
    """

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    notes: str = ""
    cores: list[int] = field(default_factory=own_cores)

    def shares_cores_with(self, other: "Process") -> bool:
        return (self.host, self.cores) == (other.host, other.cores)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Channel:
    """One end of a connection. Each message is a JSON object on a line. No method fails if the other end has left."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self._connection = connection
        self._unread = b""
        self._sending = threading.Lock()  # the main thread sends, and so does the watch
        self.has_left = False  # the other process has closed its end, or ended

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def send(self, **message: object) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for a message and return all that have arrived: none after `seconds`, or if the other end has left."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if not select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return []
            try:
                chunk = self._connection.recv(65536)
            except OSError:
                chunk = b""
            if not chunk:
                self.has_left = True
                return []
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        return [message for line in lines if isinstance(message := _parsed(line), dict)]

    def close(self) -> None:
        self._connection.close()

    __del__ = close


def _parsed(line: bytes) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return None  # not one of ours: a port scan, for instance
