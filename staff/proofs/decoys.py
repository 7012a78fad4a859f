"""What attacks could read, reach or harm: another student's file, report and process, listeners, an open folder."""

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from common.paths import ROOT

STAFF_FILE = "staff/handout/leaks.py"
SECRET_FILES = (
    STAFF_FILE, "grader/compare.py", "tests/task2b/test_partitions.py", "tests/gradients/test_averaging.py",
    "course.toml",
)  # fmt: skip
REMOVE = 0  # IPC_RMID


class Decoys:
    """Makes all of it, and says afterwards what was reached, left running or written."""

    def __init__(self, work: Path) -> None:
        self.work, self.word, self.taken = work, secrets.token_hex(12), f"taken-{secrets.token_hex(8)}"
        self.name = f"cos-{secrets.token_hex(5)}"  # the kernel keeps 15 characters of a process's name
        self.key = 1 << 20 | secrets.randbits(20)
        self.received = b""
        self.other, self.open = work / "other", work / "open"
        for folder, mode in ((work, 0o755), (self.other, 0o755), (self.open, 0o777)):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        (self.other / "run_glue.py").write_text(f"# {self.word}\n")
        (self.other / "report.json").write_text("{}")
        self.sockets = self._listen()
        waits = [sys.executable, "-I", "-S", "-c", "input()"]
        self.neighbour = subprocess.Popen(waits, stdin=subprocess.PIPE, env={"OTHERS_TOKEN": self.word})

    @property
    def words(self) -> dict[str, str]:
        """Return what stands in attacks in place of @NAME@."""
        return {
            "ROOT": str(ROOT), "STAFF": STAFF_FILE, "SECRET": str(self.other / "run_glue.py"),
            "PORT": str(self.sockets[0].getsockname()[1]), "REPORT": str(self.other / "report.json"),
            "OPEN": str(self.open), "NAME": self.name, "KEY": str(self.key), "WORD": self.word,
            "DROW": self.word[::-1], "TAKEN": self.taken,
        }  # fmt: skip

    @property
    def secrets(self) -> list[str]:
        """Return texts that no report may hold: the secret word, and a line of each file that no rank may read."""
        return [self.word, *((ROOT / file).read_text().splitlines()[0][3:60] for file in SECRET_FILES)]

    def _listen(self) -> list[socket.socket]:
        """Open four ways out of a rank, with a thread for each that keeps what arrives."""
        tcp = socket.create_server(("127.0.0.1", 0))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(tcp.getsockname())
        abstract, file = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0{self.name}")
        file.bind(str(self.open / "socket"))
        (self.open / "socket").chmod(0o777)
        for server in (abstract, file):
            server.listen()
        for server in (tcp, udp, abstract, file):
            threading.Thread(target=self._hear, args=[server], daemon=True).start()
        return [tcp, udp, abstract, file]

    def _hear(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                if server.type == socket.SOCK_DGRAM:
                    self.received += server.recv(1000)
                else:
                    with server.accept()[0] as connection:
                        self.received += connection.recv(1000)

    def close(self) -> None:
        for server in self.sockets:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        self.neighbour.kill()
        self.neighbour.communicate()

    def left_running(self) -> int:
        """Return how many processes carry our name, and kill them."""
        return len({pid for _ in range(200) for pid in self._kill_named()})  # one that forks and leaves is fast

    def _kill_named(self) -> Iterator[int]:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == self.name:
                    os.kill(int(pid), 9)
                    yield int(pid)

    def traces(self) -> str:
        """Return what was left on the machine, in words, and remove it."""
        traces = []
        if (self.other / "report.json").read_text() != "{}":
            traces.append("another's report was written")
        for path in (self.open / "left", Path("/dev/shm", self.name)):
            if path.exists():
                path.unlink()
                traces.append(f"a file was left in {path.parent.name}")
        with contextlib.suppress(OSError):
            rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
            for key, id, *_ in (row.split() for row in rows):
                if int(key) == self.key:
                    ctypes.CDLL(None).shmctl(int(id), REMOVE, None)
                    traces.append("shared memory was left")
        return ", ".join(traces)


@contextlib.contextmanager
def decoys() -> Iterator[Decoys]:
    with tempfile.TemporaryDirectory(prefix="cos-attack-", ignore_cleanup_errors=True) as folder:
        made = Decoys(Path(folder))
        try:
            yield made
        finally:
            made.close()
