"""Lets the ranks' watchdogs tell each other what they see: a few keys in a store, besides the process group.

The store is that of the process group, on rank 0 (with torchrun: of its agent). Since rank 0 may be the rank that has
died, rank 1 keeps a second one. Nobody asks the second one before the first is gone.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from common.config import RunConfig
from common.workers.rows import DIED, SILENT, STOPPED, Row

POLL_SECONDS = 0.05
PREFIX = "cos598d"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Process:
    """The process of a rank, and its machine."""

    host: str
    process: int
    space: int = 0  # its namespace of process numbers: two containers may have a host's name in common

    @classmethod
    def own(cls) -> "Process":
        with contextlib.suppress(OSError):
            return cls(socket.gethostname(), os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
        return cls(socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def is_here(self) -> bool:
        """Return whether it runs on this machine, so that its state can be read from /proc."""
        own = Process.own()
        return (self.host, self.space) == (own.host, own.space)

    def fate(self, rank: int) -> Row | None:
        """Return its row if it has died or is stopped; None while it runs, and if that cannot be known from here."""
        if not self.is_here() or not Path("/proc/self/stat").exists():
            return None
        try:
            fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return Row(rank, DIED, note=f"{self}; see its own output")
        if fields[0] in "ZX":
            return Row(rank, DIED, note=f"{self}; {_how(int(fields[-1]))}")
        return Row(rank, STOPPED, note=f"{self}: send SIGCONT to resume it") if fields[0] in "Tt" else None


class Exchange:
    """The stores as one rank sees them. No method raises; what cannot be asked is not known."""

    def __init__(self, config: RunConfig) -> None:
        self._rank, self._world_size = config.rank, config.world_size
        self._processes: dict[int, Process] = {}
        self._address = ""  # of the second store
        self._main = _innermost_store() if config.world_size > 1 else None
        self._second: dist.Store | None = None
        self._line = _line_to(self._main)
        if self._main is not None:
            self._set(self._main, f"process/{self._rank}", json.dumps(asdict(Process.own())))
            if self._rank == 1:
                self._keep_second_store(config.master_ip)
            self._get_to_know()

    @property
    def ports(self) -> list[int]:
        """The stores' own ports."""
        return [store.port for store in (self._main, self._second) if isinstance(store, dist.TCPStore)]

    def main_is_gone(self) -> bool:
        """Return whether rank 0 has closed its end of a connection that only waits for this."""
        if self._line is not None:
            with contextlib.suppress(BlockingIOError):
                try:
                    gone = self._line.recv(1, socket.MSG_PEEK) == b""
                except ConnectionError:
                    gone = True
                if gone:
                    self._line.close()
                    self._line, self._main = None, None
        return self._main is None

    def set(self, key: str, value: str, is_last: bool = False) -> None:
        """Write to the first available store.

        Write a rank's last message to both stores, because rank 0 may be about to exit.
        """
        stores = [None if self.main_is_gone() else self._main]
        if stores[0] is None or is_last:
            stores.append(self._second_store())
        for store in stores:
            if store is not None:
                self._set(store, key, value)

    def get(self, key: str) -> str:
        """Return the value of a key, "" if it is not set."""
        store = self._second_store() if self.main_is_gone() else self._main
        if store is not None:
            with contextlib.suppress(RuntimeError):
                if store.check([f"{PREFIX}/{key}"]):
                    return store.get(f"{PREFIX}/{key}").decode()
        return ""

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number and return it; 0 if there is no store."""
        store = self._second_store() if self.main_is_gone() else self._main
        if store is not None:
            with contextlib.suppress(RuntimeError):
                return store.add(f"{PREFIX}/{key}", more)
        return 0

    def collect(self, seconds: float) -> list[Row]:
        """Return one row per rank, as soon as every rank has written one, has died, or is late."""
        deadline = time.monotonic() + seconds
        rows: dict[int, Row] = {}
        while True:
            for rank in set(range(self._world_size)) - rows.keys():
                fate = self._processes[rank].fate(rank) if rank in self._processes else None
                # In this order: a rank may write its row and end in between.
                if text := self.get(f"end/{rank}"):
                    rows[rank] = Row.from_json(text)
                elif fate is not None:
                    rows[rank] = fate
            if len(rows) == self._world_size or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        for rank in set(range(self._world_size)) - rows.keys():
            where = f"{self._processes[rank]}: " if rank in self._processes else ""
            rows[rank] = Row(rank, SILENT, note=f"{where}no answer within {seconds:g} s")
        return [rows[rank] for rank in sorted(rows)]

    def _set(self, store: dist.Store, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            store.set(f"{PREFIX}/{key}", value)

    def _get_to_know(self) -> None:
        """Read where every rank runs: later the store may be gone. All have just joined, so nobody waits for long."""
        assert self._main is not None
        with contextlib.suppress(RuntimeError):
            keys = [*(f"process/{rank}" for rank in range(self._world_size)), "second"]
            self._main.wait([f"{PREFIX}/{key}" for key in keys], timedelta(seconds=30))
        for rank in range(self._world_size):
            if text := self.get(f"process/{rank}"):
                self._processes[rank] = Process(**json.loads(text))
        self._address = self.get("second")

    def _keep_second_store(self, master_ip: str) -> None:
        address = ""
        with contextlib.suppress(RuntimeError, OSError):
            address = own_address(master_ip)
            self._second = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        port = self._second.port if isinstance(self._second, dist.TCPStore) else 0
        self.set("second", f"{address} {port}" if port else "none")

    def _second_store(self) -> dist.Store | None:
        if self._second is None and " " in self._address:
            (address, port), self._address = self._address.split(), ""
            with contextlib.suppress(OSError):
                socket.create_connection((address, int(port)), timeout=2).close()  # TCPStore complains at length
                self._second = _within(2, lambda: connect_store(address, int(port)))
        return self._second


def who_joined(address: str, port: int, rank: int) -> Process | None:
    """Return which process has this rank in the run that listens there; None if no run of this course does."""

    def ask() -> Process | None:
        store, key = connect_store(address, port), f"{PREFIX}/process/{rank}"
        return Process(**json.loads(store.get(key))) if store.check([key]) else None

    with _silence():  # torch complains at length about a port where no store is
        return _within(3, ask)


def connect_store(address: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2))


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """Return the result of `ask`, or None after `seconds`: TCPStore waits without a limit for a stopped process."""
    answers: list[Answer] = []

    def work() -> None:
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            answers.append(ask())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _innermost_store() -> dist.Store | None:
    """A connection of our own to the group's store: the group's belongs to the main thread, which may hang."""
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return store.clone() if hasattr(store, "clone") else None
    return None


def _line_to(store: dist.Store | None) -> socket.socket | None:
    """Return a connection that carries nothing: when it closes, rank 0 has ended.

    Asking a store that is gone would print pages of warnings.
    """
    if isinstance(store, dist.TCPStore):
        with contextlib.suppress(OSError):
            line = socket.create_connection((store.host, store.port), timeout=5)
            line.setblocking(False)
            return line
    return None


def own_address(address: str) -> str:
    """Return this machine's own address on the way to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a datagram socket: this asks the routing table and sends nothing
        return probe.getsockname()[0]


def _how(status: int) -> str:
    """Return how a process ended, from the status that the system keeps for its parent."""
    if status & 0x7F:
        return f"killed by {signal.Signals(status & 0x7F).name}"
    return f"exit code {status >> 8}" if status >> 8 else "see its own output"
