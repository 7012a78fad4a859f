"""One run of ranks as its grader sees it, from the fork to the result.

One thread does it all: it feeds the broker with what the ranks send, keeps what they print, and watches the deadline.
It waits for whoever speaks first, never for one rank in particular.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from grader.ranks.broker import Broker
from grader.ranks.endings import failure, rank_result
from grader.ranks.outcome import Failure, Result
from grader.ranks.zygote_process import ZygoteProcess
from grader.tampering import Flag
from grader.wire import values
from grader.wire.processes import PER_RANK
from grader.wire.signatures import ENDING, Opener, new_keys
from grader.wire.values import MessageError

MAX_KEPT = 192 << 20  # bytes that one run keeps of what its ranks send, tensors and objects made of their JSON
MAX_UNREAD = 256 << 20  # bytes of answers that a rank does not take
OBJECTS = 12  # bytes of memory for a byte of JSON; for a list of empty lists 21
MAX_OUTPUT = 100_000  # bytes kept of each rank's stdout, and as many of its stderr
GRACE = 0.5  # seconds in which a rank that still computes may end by itself once the run has failed
STACK_TIME = 3  # seconds in which a rank may say where it is once the deadline has passed; it takes milliseconds
END_TIME = 30  # seconds for the zygote to kill what is left
FLOOD_PAUSE = 0.005  # seconds
OURS = "referee"  # the argument that no rank is told, see referee
PRIVATE = {"each": "mine", "later": "later"}  # arguments that are lists by rank, and what a rank's own item is called


class Output:
    """What a rank writes to one pipe: the beginning is kept, the rest counted."""

    def __init__(self, fd: int) -> None:
        self.fd, self.kept, self.dropped = fd, bytearray(), 0
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Take what is there; False when there is nothing, now or for good."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        room = MAX_OUTPUT - len(self.kept)
        self.kept += data[:room]
        self.dropped += len(data[room:])
        return bool(data)

    def text(self) -> str:
        return self.kept.decode(errors="replace")


class Seat:
    """One rank, seen from here: its line, its output, and what is known of its end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.line, self.theirs = socket.socketpair()
        self.line.setblocking(False)
        pipes = [os.pipe() for _ in range(PER_RANK - 1)]
        self.stdout, self.stderr, self.stack, self.notes = (Output(read) for read, _ in pipes)
        self.their_fds = [self.theirs.fileno(), *(write for _, write in pipes)]
        self.keys = new_keys()
        self.frames = values.Frames(check=Opener(self.keys).open)
        self.mine: Any = None  # what only this rank starts with, for when it asks
        self.later: dict[str, Any] = {}  # what it is given one by one; when it asked is noted among its events
        self.outgoing = bytearray()
        self.listening = True
        self.ending = ""  # its last word: "returned" or "raised"
        self.value: Any = None
        self.error: Failure | None = None
        self.never_waited: list[int] = []
        self.code: int | None = None  # exit code once it has ended, negative for a signal
        self.flags: list[Flag] = []

    @property
    def outputs(self) -> tuple[Output, ...]:
        return self.stdout, self.stderr, self.stack, self.notes

    def give_away(self) -> None:
        """Their ends now belong to the zygote."""
        self.theirs.close()
        for fd in self.their_fds[1:]:
            os.close(fd)
        self.their_fds = []

    def close(self) -> None:
        if self.their_fds:
            self.give_away()
        self.line.close()
        for output in self.outputs:
            os.close(output.fd)


class Run:
    """One run, from the fork to the result."""

    def __init__(self, zygote: ZygoteProcess, job: dict, world_size: int, deadline: float, keep_payloads: bool) -> None:
        self.zygote, self.deadline, self.tree = zygote, deadline, job["tree"]
        self.broker = Broker(world_size, keep_payloads)
        self.seats = [Seat(rank) for rank in range(world_size)]
        self.selector = selectors.DefaultSelector()
        self.flooding: list[Output] = []  # beyond their limit: emptied now and then, and not at every line
        self.over = False  # what ranks say now, dying, counts no more
        self.kept = 0  # bytes, about
        self.left: int | None = None  # processes that were left over, known when all are gone
        self.children = -1  # see Result
        told = job["arguments"]
        self.referee = told.get(OURS)
        request = {"probe": job["probe"], "file": str(told.get("file", "")), "children": told.get("children", 0)}
        zygote.request(kind="run", world_size=world_size, **request)
        socket.send_fds(zygote.control, [b"."], [fd for seat in self.seats for fd in seat.their_fds])
        self.folder = zygote.receive()["folder"]
        self.selector.register(zygote.control, selectors.EVENT_READ, self._hear_zygote)
        for seat in self.seats:
            seat.give_away()
            self.selector.register(seat.line, selectors.EVENT_READ, lambda seat=seat: self._hear_rank(seat))
            for output in seat.outputs:
                self.selector.register(output.fd, selectors.EVENT_READ, lambda output=output: self._hear_output(output))
            told = rank_job(job, seat.rank)
            seat.mine = told["arguments"].pop("mine", None)
            seat.later = told["arguments"].pop("later", {})
            keys = [key.hex() for key in seat.keys]
            seat.outgoing += values.pack(told | {"world_size": world_size, "keys": keys})
            self._flush(seat)

    def close(self) -> None:
        self.selector.close()
        for seat in self.seats:
            seat.close()

    def result(self) -> Result:
        limit = time.monotonic() + self.deadline
        self._serve(limit, lambda: self._all_ended() or self.broker.fault is not None)
        in_time = self._all_ended() or self.broker.fault is not None
        if self.broker.fault:
            self._serve(min(limit, time.monotonic() + GRACE), self._all_ended)
        if not self._all_ended():
            self.zygote.request(kind="stacks")
            self._serve(time.monotonic() + STACK_TIME, self._all_told_their_stack)
        unfinished = {seat.rank for seat in self.seats if seat.code is None}
        self.over = True
        self.zygote.request(kind="end")
        self._serve(time.monotonic() + END_TIME, lambda: self.left is not None)
        for output in (output for seat in self.seats for output in seat.outputs):
            while output.read():
                pass
        ranks = [rank_result(seat, self.broker, self.tree, seat.rank in unfinished, in_time) for seat in self.seats]
        left, children = self.left or 0, self.children
        told = self.deadline, left, self.kept, children, self.referee
        return Result(ranks, self.broker.fault, self.broker.completed, *told)

    def _serve(self, until: float, enough: Callable[[], bool]) -> None:
        """Answer whoever speaks, until that is enough or the time is up."""
        while not enough() and (rest := until - time.monotonic()) > 0:
            for key, mask in self.selector.select(min(rest, FLOOD_PAUSE) if self.flooding else rest):
                if mask & selectors.EVENT_READ:
                    key.data()
            for output in self.flooding:
                output.read()
            for rank, message in self.broker.replies:
                self.seats[rank].outgoing += values.pack(message)
            self.broker.replies.clear()
            for seat in self.seats:
                self._flush(seat)

    def _all_ended(self) -> bool:
        return all(seat.code is not None for seat in self.seats)

    def _all_told_their_stack(self) -> bool:
        return all(seat.code is not None or b"<module>" in seat.stack.kept for seat in self.seats)

    def _flush(self, seat: Seat) -> None:
        """Write what fits: a rank that does not read must not keep us from hearing the others."""
        if not seat.outgoing or not seat.listening:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while seat.outgoing:
                del seat.outgoing[: seat.line.send(seat.outgoing[: 1 << 20])]
        write = selectors.EVENT_WRITE if seat.outgoing else 0
        self.selector.modify(seat.line, selectors.EVENT_READ | write, self.selector.get_key(seat.line).data)

    def _hear_output(self, output: Output) -> None:
        if not output.read():
            self.selector.unregister(output.fd)
        elif output.dropped:
            self.selector.unregister(output.fd)
            self.flooding.append(output)

    def _hear_zygote(self) -> None:
        try:
            message = self.zygote.receive()
        except RuntimeError:  # a rank has killed it, and with it died all the others
            self.selector.unregister(self.zygote.control)
            for seat in self.seats:
                seat.code = -signal.SIGKILL if seat.code is None else seat.code
            message = {"kind": "gone", "left": self.zygote.kill_marked()}
            shutil.rmtree(self.folder, ignore_errors=True)
        if message["kind"] == "gone":
            self.left, self.children = message["left"], message.get("children", -1)
            return
        seat = self.seats[message["rank"]]
        while self._hear_rank(seat):
            pass
        if not seat.ending and not self.over and seat.frames.incomplete and message["code"] >= 0:
            self._disbelieve(seat, MessageError("its last bytes are no message"))
        seat.code = message["code"] if seat.code is None else seat.code
        if not seat.ending and not self.over:
            self.broker.finish(seat.rank)

    def _hear_rank(self, seat: Seat) -> bool:
        """Take what a rank has sent; False when there is nothing, now or for good."""
        if not seat.listening or self.over:
            return False
        try:
            data = seat.line.recv(1 << 20)
            for message in seat.frames.feed(data):
                self._take(seat, message)
        except BlockingIOError:
            return False
        except ConnectionError:  # it has ended without reading all we sent
            data = b""
        except MessageError as error:
            self._disbelieve(seat, error)
            data = b""
        if not data:
            seat.listening = False
            self.selector.unregister(seat.line)
        return bool(data)

    def _disbelieve(self, seat: Seat, error: MessageError) -> None:
        """Not what our own code in the rank sends: somebody else has written to the line. Believe nothing more."""
        seat.ending, seat.value, seat.code = "raised", None, 1
        seat.error = Failure("MessageError", str(error))
        seat.flags.append(Flag("", 0, f"sends what the grader's code in a rank does not: {error}"))
        self.broker.finish(seat.rank)

    def _keep(self, seat: Seat) -> None:
        """Count what a message leaves in memory; payloads of collectives go when they have arrived."""
        header, body = seat.frames.sizes
        self.kept += OBJECTS * header + body
        if self.kept - self.broker.forgotten > MAX_KEPT or len(seat.outgoing) > MAX_UNREAD:
            raise MessageError(f"the ranks send more than the {MAX_KEPT >> 20} MiB that a run may take")

    def _take(self, seat: Seat, message: Any) -> None:
        try:
            self._keep(seat)
            match message["kind"]:
                case _ if seat.ending:
                    raise MessageError("a message after the last one")
                case kind if (kind in ("returned", "raised")) != (seat.frames.signed_by == ENDING):
                    raise MessageError(f"a message of the kind {kind} with the signature of another")
                case "call":
                    self.broker.post(seat.rank, message)
                case "wait":
                    self.broker.wait(seat.rank, message)
                case "ask" if self.referee:
                    answers = self.referee.ask(message)
                    seat.outgoing += b"".join(values.pack({"id": number, "payload": said}) for number, said in answers)
                case "inputs":
                    seat.outgoing += values.pack({"id": int(message["id"]), "payload": self._given(seat, message)})
                case "event":
                    self.broker.note(seat.rank, message)
                case "returned" | "raised" as ending:
                    seat.never_waited = list(message["never_waited"])
                    seat.value, seat.error = message.get("value"), failure(message.get("error"))
                    seat.ending = ending
                    self.broker.finish(seat.rank)
                case other:
                    raise MessageError(f"a message of the kind {other}")
        except MessageError:
            raise
        except Exception as error:  # whatever a forged message holds, it must not end the grader
            raise MessageError(f"{type(error).__name__}: {error}") from error

    def _given(self, seat: Seat, message: dict) -> Any:
        """What a rank alone has; of what it is given `later` one piece, and the event "given" is put down by us."""
        key = message.get("key")
        if key is None:
            return seat.mine
        self.broker.note(seat.rank, {"name": "given", "where": "", "inside": "", "data": {"key": str(key)}})
        return seat.later[key]


def rank_job(job: dict, rank: int) -> dict:
    """What one rank is told. Of the arguments in PRIVATE, lists by rank, it gets its own item and no other: who knew
    what the others start with could compute their mean alone."""
    arguments = {name: value for name, value in job["arguments"].items() if name not in (*PRIVATE, OURS)}
    arguments |= {PRIVATE[name]: value[rank] for name, value in job["arguments"].items() if name in PRIVATE}
    return job | {"arguments": arguments, "rank": rank}
