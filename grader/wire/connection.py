"""A rank's connection to the grader: events and calls go out in their order, answers come back by number."""

import os
import socket
import sys
import threading
from typing import Any

from grader.wire import values
from grader.wire.call_sites import Sites


class CollectiveError(RuntimeError):
    """A collective that can never complete: the ranks do not agree, or somebody they wait for is gone."""


class Wire:
    """The rank's end of its socket pair, shared by all of its process groups and events."""

    def __init__(self, connection: socket.socket, sites: Sites) -> None:
        self.pid = os.getpid()
        self._connection, self._sites = connection, sites
        self._writing, self._arrived = threading.Lock(), threading.Condition()
        self._reader = False  # whether a thread blocks in `receive` for all of them
        self._answers: dict[int, dict] = {}
        self._calls = 0
        self._callers: set[threading.Thread] = set()
        self.pending: dict[int, Any] = {}  # handles of calls nobody has waited for, oldest first

    def send(self, message: dict) -> None:
        """Send a message. Raises MessageError for a value that cannot be sent."""
        data = values.pack(message)
        with self._writing:
            self._connection.sendall(data)

    def event(self, name: str, data: dict) -> None:
        where, inside = self._sites(sys._getframe(1))
        self.send({"kind": "event", "name": name, "data": data, "where": where, "inside": inside})

    def post(self, name: str, fields: dict, waits: bool) -> int:
        """Send a call to the grader, return its number. `waits`: this thread does nothing before it has the answer."""
        with self._arrived:
            self._calls += 1
            number = self._calls
        where, inside = self._sites(sys._getframe(1))
        message = {"kind": "call", "id": number, "name": name, "where": where, "inside": inside}
        self.send(message | fields | self._waiter(waits))
        return number

    def _waiter(self, waits: bool) -> dict:
        """Return whether this thread waits, and all threads that may call: that have called, or that are no daemons."""
        self._callers.add(threading.current_thread())
        others = [thread for thread in threading.enumerate() if thread in self._callers or not thread.daemon]
        return {"waits": waits, "thread": _name(threading.current_thread()), "threads": [*map(_name, others)]}

    def answered(self, number: int) -> bool:
        """Return whether the answer is here already; never blocks."""
        with self._arrived:
            while number not in self._answers and not self._reader and self._readable():
                self._read_one()
            return number in self._answers

    def answer(self, number: int, announced: bool) -> Any:
        """Block until the answer to a call is here; return its bytes as a tensor. Raises CollectiveError."""
        if not announced:  # sent even if the answer is here: the grader counts the messages in transit
            self.send({"kind": "wait", "id": number} | self._waiter(True))
        with self._arrived:
            while number not in self._answers:
                if self._reader:
                    self._arrived.wait()  # another thread reads, and wakes this one at each message
                else:
                    self._read_one()
            message = self._answers.pop(number)
        if "error" in message:
            raise CollectiveError(message["error"])
        return message["payload"]

    def _read_one(self) -> None:
        """Block for one message, without the lock, so that other threads can take their answers."""
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


def _name(thread: threading.Thread) -> int:
    return 0 if thread is threading.main_thread() else thread.ident or -1
