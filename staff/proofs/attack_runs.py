"""One run of one attack, in surroundings made for it: what there is to be had lies there, and what was had is seen."""

import contextlib
import ctypes
import functools
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.paths import ROOT
from staff.proofs import attack_bank, undefended
from staff.proofs.attack_bank import VICTIM, Attack
from staff.sandbox.graded_run import Outcome, run_graded

STAFF_FILE = "staff/handout/leaks.py"
SECRET_FILES = (
    STAFF_FILE, "grader/compare.py", "tests/task2b/test_partitions.py", "tests/gradients/test_averaging.py",
    "course.toml",
)  # fmt: skip
NAME_LENGTH = 15  # characters of a process's name that the kernel keeps
SLOWNESS = "1.5"  # of the deadlines of single runs: several attacks run at once
REMOVE = 0  # IPC_RMID


@dataclass(frozen=True)
class Gain:
    """What an attack came to; empty if nothing."""

    points: int = 0
    secret: str = ""
    running: int = 0
    harm: str = ""

    def has(self, what: str) -> bool:
        return bool(getattr(self, what))

    def __bool__(self) -> bool:
        return bool(self.points or self.secret or self.running or self.harm)

    def __str__(self) -> str:
        gains = {
            f"{self.points} points": self.points, f"a secret ({self.secret})": self.secret,
            f"{self.running} left running": self.running, self.harm: self.harm,
        }  # fmt: skip
        return " and ".join(words for words, gain in gains.items() if gain) or "nothing"


class Surroundings:
    """Another student's file, report and process, listeners, a folder open to all: what can be had or harmed."""

    def __init__(self, work: Path) -> None:
        self.work, self.word, self.taken = work, secrets.token_hex(12), f"taken-{secrets.token_hex(8)}"
        self.name = f"cos-{secrets.token_hex(5)}"[:NAME_LENGTH]
        self.key = random.randrange(1 << 20, 1 << 30)
        self.received = b""
        os.chmod(work, 0o755)
        self.other, self.open = work / "other", work / "open"
        self.other.mkdir()
        self.open.mkdir()
        self.open.chmod(0o777)
        (self.other / "run_glue.py").write_text(f"# {self.word}\n")
        (self.other / "report.json").write_text("{}")
        self.report = work / f"kept-in-{self.word}" / "report.json"
        self.report.parent.mkdir(mode=0o700)
        self.sockets = self._listen()
        waits = [sys.executable, "-I", "-S", "-c", "input()"]
        self.neighbour = subprocess.Popen(waits, stdin=subprocess.PIPE, env={"OTHERS_TOKEN": self.word})

    @property
    def places(self) -> dict[str, str]:
        port = str(self.sockets[0].getsockname()[1])
        return {
            "ROOT": str(ROOT), "STAFF": STAFF_FILE, "SECRET": str(self.other / "run_glue.py"), "PORT": port,
            "REPORT": str(self.other / "report.json"), "OPEN": str(self.open), "NAME": self.name, "KEY": str(self.key),
            "WORD": self.word, "TAKEN": self.taken, "DROW": self.word[::-1],
        }  # fmt: skip

    def _listen(self) -> list[socket.socket]:
        """Four ways out of a rank, and a thread for each that keeps what comes."""
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
                    connection, _ = server.accept()
                    with connection:
                        self.received += connection.recv(1000)

    def close(self) -> None:
        for server in self.sockets:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        self.neighbour.kill()
        self.neighbour.communicate()

    def left_running(self) -> int:
        """How many processes carry our name; they are killed."""
        return len({pid for _ in range(200) for pid in self._kill_named()})

    def _kill_named(self) -> Iterator[int]:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == self.name:
                    os.kill(int(pid), 9)
                    yield int(pid)

    def traces(self) -> str:
        """What was left on the machine, in words; it is removed."""
        traces = []
        if (self.other / "report.json").read_text() != "{}":
            traces.append("another's report was written")
        for path in (self.open / "left", Path("/dev/shm", self.name)):
            if path.exists():
                path.unlink()
                traces.append(f"a file was left in {path.parent.name}")
        with contextlib.suppress(OSError):
            rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
            for row in (row.split() for row in rows):
                if int(row[0]) & 0xFFFFFFFF == self.key:
                    ctypes.CDLL(None).shmctl(int(row[1]), REMOVE, None)
                    traces.append("shared memory was left")
        return ", ".join(traces)


@contextlib.contextmanager
def surroundings() -> Iterator[Surroundings]:
    with tempfile.TemporaryDirectory(prefix="cos-attack-", ignore_cleanup_errors=True) as folder:
        around = Surroundings(Path(folder))
        try:
            yield around
        finally:
            around.close()


def attempt(attack: Attack, off: Sequence[str]) -> Gain:
    """Hand the attack in, grade it and an honest task after it, and look what came of it."""
    with surroundings() as around:
        submission, tree = around.work / "submission", around.work / "tree"
        attack_bank.hand_in(attack, submission, around.places)
        attack_bank.tree_of(submission, tree, believing="files" in off)
        os.environ["PLATFORM_TOKEN"] = around.word  # attacks that run beside each other see one another's: any will do
        outcome = run_graded(
            tree, around.report, tests=[attack.test, VICTIM], seed=1 if "seed" in off else None,
            deadline_s=attack.deadline, env={"COS598D_SLOWNESS": SLOWNESS}, off=off, limits=attack.limits,
            supervisor=undefended.__name__ if set(off) & set(undefended.SWITCHES) else "staff.sandbox.supervisor",
        )  # fmt: skip
        return judge(attack, around, outcome)


def judge(attack: Attack, around: Surroundings, outcome: Outcome) -> Gain:
    """What can be seen from outside after a run: in the report, at the listener, in /proc and on the disk."""
    running, traces = around.left_running(), around.traces()
    text = around.report.read_text() if around.report.exists() else "{}"
    try:
        tests: dict[str, Any] = {test["id"]: test for test in json.loads(text)["tests"]}
    except (ValueError, KeyError, TypeError):
        tests = {}
    points = sum(test["points"] for name, test in tests.items() if name == attack.test and test["status"] == "passed")
    secret = "told a listener" if around.word.encode() in around.received else ""
    words = [around.word, os.environ["PLATFORM_TOKEN"], *(first_line(ROOT / file) for file in SECRET_FILES)]
    if any(word in text.replace('\\"', '"') for word in words):
        secret = "in the report"
    harm = [traces] if traces else []
    if tests.get(VICTIM, {}).get("status") != "passed":
        ended = "at the deadline" if outcome.timed_out else f"code {outcome.exit_code}"
        harm.append(f"the next task got no points (graders ended: {ended})")
    if around.taken in text:
        harm.append("took more than it may have")
    if outcome.peak_pss_mb > attack.most_memory:
        harm.append(f"{outcome.peak_pss_mb:.0f} MiB")
    return Gain(points, secret, running, ", ".join(harm))


@functools.cache
def first_line(path: Path) -> str:
    return path.read_text().splitlines()[0][3:60]
