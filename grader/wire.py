"""A rank's one line to the grader: events and calls go out in the order they happen, answers come back by number."""

import os
import socket
import sys
import threading
from pathlib import PurePath
from types import FrameType
from typing import Any

from grader import values

# Between a student's dist.all_reduce(...) and the backend stand only these modules: such a call is the student's own.
PLUMBING = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
OURS = {"grader", "tests", "staff"}


class CollectiveError(RuntimeError):
    """A collective that can never complete: the ranks do not agree, or somebody they wait for is gone."""


class Wire:
    """The rank's end of its socket pair, shared by every process group, spy and probe in the rank."""

    def __init__(self, connection: socket.socket, tree: str) -> None:
        self.pid = os.getpid()
        self.tree = tree
        self._connection = connection
        self._writing, self._arrived = threading.Lock(), threading.Condition()
        self._reader = False  # whether a thread blocks in `receive` for all of them
        self._answers: dict[int, dict] = {}
        self._calls = 0
        self._callers: set[threading.Thread] = set()
        self._names: dict[str, str] = {}
        self.pending: dict[int, Any] = {}  # handles of calls nobody has waited for, oldest first

    def send(self, message: dict) -> None:
        data = values.pack(message)
        with self._writing:
            self._connection.sendall(data)

    def event(self, name: str, data: dict) -> None:
        where, inside = self.call_site()
        self.send({"kind": "event", "name": name, "where": where, "inside": inside, "data": data})

    def post(self, name: str, fields: dict, waits: bool) -> int:
        """Tell the grader of a call, return its number. `waits` says that this thread does nothing before `answer`."""
        where, inside = self.call_site()
        with self._writing:
            self._calls += 1
            number = self._calls
            call = {"kind": "call", "id": number, "name": name, "where": where, "inside": inside}
            self._connection.sendall(values.pack(call | fields | self._waiter(waits)))
        return number

    def _waiter(self, waits: bool) -> dict:
        """Which thread waits, and which others might still call: those that have, and those that are no daemons."""
        self._callers.add(threading.current_thread())
        others = [thread for thread in threading.enumerate() if thread in self._callers or not thread.daemon]
        return {"waits": waits, "thread": _name(threading.current_thread()), "threads": [*map(_name, others)]}

    def answered(self, number: int) -> bool:
        """Whether the answer is here already; never blocks."""
        with self._arrived:
            while number not in self._answers and not self._reader and self._readable():
                self._read_one()
            return number in self._answers

    def answer(self, number: int, announced: bool) -> Any:
        """Block until the answer to a call is here; return its bytes as a tensor. Raises CollectiveError."""
        if not announced and not self.answered(number):
            self.send({"kind": "wait", "id": number} | self._waiter(True))
        with self._arrived:
            while number not in self._answers:
                if self._reader:
                    self._arrived.wait()  # another thread reads, and wakes us at each message
                else:
                    self._read_one()
            message = self._answers.pop(number)
        if "error" in message:
            raise CollectiveError(message["error"])
        return message["payload"]

    def _read_one(self) -> None:
        """Block for one message, without the lock, so that other threads can find theirs."""
        self._reader = True
        self._arrived.release()
        try:
            message = values.receive(self._connection, values.to_tensor)
        finally:
            self._arrived.acquire()
            self._reader = False
            self._arrived.notify_all()
        self._answers[message["id"]] = message

    def _readable(self) -> bool:
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False

    def call_site(self) -> tuple[str, str]:
        """(file:line of the innermost frame in the student's tree, what stands between it and us).

        The second is "" for a call that the student's own line makes, "DistributedDataParallel" inside of it,
        "backward" for what autograd calls, else the name of the library's module.
        """
        frame: FrameType | None = sys._getframe(1)
        inside = ""
        while frame is not None:
            name = self.student_file(frame.f_code.co_filename)
            if name:
                return f"{name}:{frame.f_lineno}", inside
            module = frame.f_globals.get("__name__", "")
            if module.startswith("torch.nn.parallel"):
                inside = "DistributedDataParallel"
            elif not inside and not module.startswith(PLUMBING) and module.split(".")[0] not in OURS:
                inside = "backward" if module.startswith("torch.autograd") else module
            frame = frame.f_back
        return "", inside

    def student_file(self, filename: str) -> str:
        """As the function below, remembered: it is asked for every frame of every call."""
        if filename not in self._names:
            self._names[filename] = student_file(self.tree, filename)
        return self._names[filename]


def student_file(tree: str, filename: str) -> str:
    """The path of a file inside the student's tree, or "" for everything that is not a student's."""
    parts = PurePath(filename).relative_to(tree).parts if filename.startswith(tree.rstrip("/") + "/") else ()
    hidden = any(part.startswith(".") or part == "site-packages" for part in parts)
    return "" if not parts or hidden or parts[0] in OURS else "/".join(parts)


def _name(thread: threading.Thread) -> int:
    return 0 if thread is threading.main_thread() else thread.ident or -1
