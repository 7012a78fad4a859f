"""Lets the ranks' watchdogs tell each other what they see: every rank has a connection to every other one.

A rank keeps what it hears. So nobody has to ask a rank that hangs or has died, and every rank sees at once when another
one has ended: its connection closes. The connections are made when all ranks have just joined.
"""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.config import RunConfig
from common.workers.machine import own_address
from common.workers.rows import DIED, FINISHED, SILENT, STOPPED, Row

POLL_SECONDS = 0.05
CONNECT_SECONDS = 30
SEND_SECONDS = 2  # a process that was stopped by Ctrl-Z takes nothing once its buffer is full


@dataclass(frozen=True)
class Process:
    """The process of a rank, and its machine; by default this process."""

    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def is_stopped(self) -> bool:
        """Return whether it was suspended, for instance with Ctrl-Z; False also if it runs on another machine."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
            return self.host == socket.gethostname() and state in "Tt"
        return False


class Exchange:
    """The other ranks' watchdogs as one rank sees them. No method raises; what was not heard is not known.

    heard: of each kind of message, what every rank has said last. "sleep" is for standstill.py; "end": the last row of
        a rank, which says nothing afterwards.
    ports: those of the connections, so that their bytes can be told from those of the collectives.
    """

    def __init__(self, config: RunConfig) -> None:
        self._rank = config.rank
        self._others = set(range(config.world_size)) - {config.rank}
        self._processes: dict[int, Process] = {}
        self._connections: dict[int, socket.socket] = {}
        self._gone: set[int] = set()  # ranks that were connected and have left, or whose process has ended
        self._sending = threading.Lock()
        self.heard: dict[str, dict[int, Any]] = {"sleep": {}, "end": {}}
        self.ports: list[int] = []
        if self._others:
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                self._connect(config.master_ip)

    def tell(self, kind: str, content: Any) -> None:
        """Tell all ranks; each replaces what it has heard of this kind."""
        self.heard[kind][self._rank] = content
        line = json.dumps([kind, content]).encode() + b"\n"
        with self._sending:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.sendall(line)

    def last_rows(self) -> dict[int, Row]:
        """Return the last rows of the ranks that have sent one."""
        return {rank: Row.from_json(text) for rank, text in list(self.heard["end"].items())}

    def close(self) -> None:
        """Say that this rank has left; what it said before arrives first."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def lost(self) -> list[int]:
        """Return the ranks that have left, and not because they have finished."""
        finished = {rank for rank, row in self.last_rows().items() if row.state == FINISHED}
        return sorted(self._gone - finished)

    def wait_for_end(self, ranks: Iterable[int], seconds: float) -> None:
        """Return when these ranks have left, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._connections.keys() & set(ranks)) - self._gone:
            time.sleep(POLL_SECONDS)

    def collect(self, seconds: float) -> list[Row]:
        """Return one row per rank, as soon as every rank has sent its last one, has died, or is late."""
        deadline = time.monotonic() + seconds
        rows: dict[int, Row] = {}
        while len(rows) <= len(self._others) and time.monotonic() < deadline:
            rows = {}
            for rank, process in self._processes.items():
                if rank in self._gone:
                    rows[rank] = Row(rank, DIED, note=f"{process}; see its own output")
                elif process.is_stopped():
                    rows[rank] = Row(rank, STOPPED, note=f"{process}: send SIGCONT to resume it")
            rows |= self.last_rows()  # read after _gone: a last row arrives before the connection closes
            time.sleep(POLL_SECONDS)
        for rank in {self._rank, *self._others} - rows.keys():
            where = f"{self._processes[rank]}: " if rank in self._processes else ""
            rows[rank] = Row(rank, SILENT, note=f"{where}no answer within {seconds:g} s")
        return [rows[rank] for rank in sorted(rows)]

    def _connect(self, master_ip: str) -> None:
        """Connect to every lower rank, and let every higher one connect to this."""
        group_store = dist.distributed_c10d._get_default_store()
        earlier = (group_store.add("watchdogs", 1) - 1) // (len(self._others) + 1)  # their addresses are still there
        store = dist.PrefixStore(f"watchdogs {earlier}", group_store)
        with socket.create_server((own_address(master_ip), 0), backlog=len(self._others)) as server:
            store.set(str(self._rank), json.dumps([server.getsockname(), asdict(Process())]))
            self.ports.append(server.getsockname()[1])
            store.wait([str(rank) for rank in self._others], timedelta(seconds=CONNECT_SECONDS))
            for rank in sorted(self._others):
                (address, port), process = json.loads(store.get(str(rank)))
                self._processes[rank] = Process(**process)
                if rank < self._rank:
                    self.ports.append(port)
                    connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
                    connection.sendall(self._rank.to_bytes(4, "big"))
                    self._add(rank, connection)
            server.settimeout(CONNECT_SECONDS)
            while self._others - self._connections.keys():
                connection, _ = server.accept()
                connection.settimeout(CONNECT_SECONDS)
                rank = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
                if rank in self._others - self._connections.keys():  # and not another program
                    self._add(rank, connection)

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self._connections[rank] = connection
        threading.Thread(target=self._listen, args=(rank, connection), daemon=True, name=f"hears rank {rank}").start()

    def _listen(self, rank: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for line in connection.makefile("rb"):
                with contextlib.suppress(ValueError):  # half a line: the rank was stopped in the middle of it
                    kind, content = json.loads(line)
                    self.heard[kind][rank] = content
        self._gone.add(rank)
