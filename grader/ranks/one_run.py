"""Makes one run of ranks for the grader, from the fork to the result.

One thread does it all: it passes what the ranks send to the broker, keeps what they print, and watches the deadline. It
waits for the first message of any rank, never for one rank in particular.
"""

import contextlib
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grader.ranks.broker import Broker
from grader.ranks.endings import failure, rank_result
from grader.ranks.outcome import ENDLESS, Failure, Result
from grader.ranks.rank_process import Output, RankProcess
from grader.ranks.storages import Storages
from grader.ranks.zygote_process import ZygoteProcess
from grader.wire import values
from grader.wire.processes import memory
from grader.wire.request import Job, Request
from grader.wire.values import Fields, MessageError, TooMuchError

MAX_KEPT = 192 << 20  # bytes that one run keeps of what its ranks send, tensors and objects made of their JSON
MAX_UNREAD = 256 << 20  # bytes of answers that a rank does not take
OBJECTS = 12  # bytes of memory for a byte of JSON, at least
GRACE = 0.5  # seconds in which a rank that still computes may end by itself once the run has failed
STACK_TIME = 3  # seconds in which a rank may say where it is once the deadline has passed; it takes milliseconds
END_TIME = 30  # seconds for the zygote to kill what is left


@dataclass(frozen=True)
class Debug:
    """Which rank has pdb, in which terminal (a path), and the lines (file, number) where it stops by itself.

    In the other ranks, in all of them where `rank` is None, breakpoint() does nothing.
    """

    rank: int | None
    terminal: str
    stops: Sequence[tuple[str, int]] = ()


class RankRun:
    """One run, from the fork to the result."""

    def __init__(
        self,
        zygote: ZygoteProcess,
        request: Request,
        tree: str,
        given: Fields | None = None,
        debug: Debug | None = None,
    ) -> None:
        self.zygote, self.deadline, self.tree = zygote, request.deadline, tree
        self.debug = debug
        world_size = len(request.inputs)
        self.storages = Storages(request.storages, request.full)
        self.broker = Broker(world_size, request.payloads, self._measure, self.storages)
        self.processes = [RankProcess(rank) for rank in range(world_size)]
        self.selector = selectors.DefaultSelector()
        self.over = False  # then what dying ranks send counts no more
        self.kept = 0  # bytes, about
        self.gone = False  # whether all processes of the run have ended
        self.memory: dict[str, list[int]] = {}  # see Result
        zygote.request(
            kind="run",
            world_size=world_size,
            terminals={str(debug.rank): debug.terminal} if debug else {},
            given=given,
            preload=request.preload,
            allows=list(request.function.allows) if request.function else [],
            measures=request.measures,
        )
        socket.send_fds(zygote.control, [b"."], [fd for process in self.processes for fd in process.rank_fds])
        started = zygote.receive()
        self.folder, self.pids = started["folder"], started["pids"]
        self.selector.register(zygote.control, selectors.EVENT_READ, self._hear_zygote)
        for process in self.processes:
            process.give_away()
            self.selector.register(process.connection, selectors.EVENT_READ, partial(self._hear_rank, process))
            for output in process.outputs:
                self.selector.register(output.fd, selectors.EVENT_READ, partial(self._hear_output, output))
            process.outgoing += values.pack(job_of(request, process.rank, tree, debug).as_message())
            self._flush(process)

    def close(self) -> None:
        self.selector.close()
        for process in self.processes:
            process.close()

    def result(self) -> Result:
        """Serve the ranks until all have ended, failed or met the deadline; then end them, and say how each ended."""
        limit = time.monotonic() + self.deadline
        self._serve(limit, lambda: self._all_ended() or self.broker.fault is not None)
        in_time = self._all_ended() or self.broker.fault is not None
        if self.debug and self.debug.rank is not None and self.broker.fault:  # somebody may be typing
            debugged = self.processes[self.debug.rank]
            self._serve(limit, lambda: debugged.code is not None)
        if self.broker.fault:
            self._serve(min(limit, time.monotonic() + GRACE), self._all_ended)
        if not self._all_ended():
            self.zygote.request(kind="stacks")
            self._serve(time.monotonic() + STACK_TIME, self._all_wrote_their_stack)
        unfinished = {process.rank for process in self.processes if process.code is None}
        self.over = True
        self.zygote.request(kind="end")
        self._serve(time.monotonic() + END_TIME, lambda: self.gone)
        for output in (output for process in self.processes for output in process.outputs):
            while output.read():
                pass
        ranks = [
            rank_result(process, self.broker, self.tree, process.rank in unfinished, in_time)
            for process in self.processes
        ]
        broker, contents = self.broker, self.storages.contents
        return Result(ranks, broker.fault, broker.completed, self.deadline, self.kept, self.memory, contents)

    def _measure(self, point: str) -> None:
        """Look from outside how much memory each rank has: nothing that a rank says counts."""
        self.memory[point] = [memory(pid) for pid in self.pids]

    def _serve(self, until: float, enough: Callable[[], bool]) -> None:
        """Handle messages of ranks and zygote until `enough` returns True or the time is up."""
        while not enough() and (rest := until - time.monotonic()) > 0:
            for key, mask in self.selector.select(rest):
                if mask & selectors.EVENT_READ:
                    key.data()
            for rank, message in self.broker.replies:
                self.processes[rank].outgoing += values.pack(message)
            self.broker.replies.clear()
            for process in self.processes:
                self._flush(process)

    def _all_ended(self) -> bool:
        return all(process.code is not None for process in self.processes)

    def _all_wrote_their_stack(self) -> bool:
        return all(process.code is not None or b"<module>" in process.stack.kept for process in self.processes)

    def _flush(self, process: RankProcess) -> None:
        """Write what fits: the other ranks must not wait for a rank that does not read."""
        if not process.outgoing or not process.listening:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while process.outgoing:
                del process.outgoing[: process.connection.send(process.outgoing[: 1 << 20])]
        write = selectors.EVENT_WRITE if process.outgoing else 0
        key = self.selector.get_key(process.connection)
        self.selector.modify(process.connection, selectors.EVENT_READ | write, key.data)

    def _hear_output(self, output: Output) -> None:
        if not output.read():
            self.selector.unregister(output.fd)

    def _hear_zygote(self) -> None:
        """Take a message of the zygote: a rank has exited, or all processes are gone."""
        try:
            message = self.zygote.receive()
        except RuntimeError:  # a rank has killed it, and with it died all the others
            self.selector.unregister(self.zygote.control)
            for process in self.processes:
                process.code = -signal.SIGKILL if process.code is None else process.code
            message = {"kind": "gone"}
            shutil.rmtree(self.folder, ignore_errors=True)
        if message["kind"] == "gone":
            self.gone = True
            return
        process = self.processes[message["rank"]]
        while self._hear_rank(process):
            pass
        if not process.ending and not self.over and process.frames.incomplete and message["code"] >= 0:
            self._disbelieve(process, MessageError("its last bytes are not a complete message"))
        process.code = message["code"] if process.code is None else process.code
        if not process.ending and not self.over:
            self.broker.finish(process.rank)

    def _hear_rank(self, process: RankProcess) -> bool:
        """Take what a rank has sent. Return False if there is nothing, now or for good."""
        if not process.listening or self.over:
            return False
        try:
            data = process.connection.recv(1 << 20)
            for message in process.frames.feed(data):
                self._take(process, message)
        except BlockingIOError:
            return False
        except ConnectionError:  # it has ended without reading all that was sent to it
            data = b""
        except TooMuchError as error:
            self._end_endless(process, error)
            data = b""
        except MessageError as error:
            self._disbelieve(process, error)
            data = b""
        if not data:
            process.listening = False
            self.selector.unregister(process.connection)
        return bool(data)

    def _end_endless(self, process: RankProcess, error: TooMuchError) -> None:
        """End a rank whose loop never ends, at the line of its last call. This is no tampering."""
        events = self.broker.events[process.rank]
        process.ending, process.value, process.code = "raised", None, 1
        process.error = Failure(
            ENDLESS, f"{error}: does a loop in your code never end?", last_call=events[-1].where if events else ""
        )
        self.broker.finish(process.rank)

    def _disbelieve(self, process: RankProcess, error: MessageError) -> None:
        """End a rank that has sent what the grader's code never sends: other code writes to its connection."""
        process.ending, process.value, process.code = "raised", None, 1
        process.error = Failure("MessageError", str(error))
        self.broker.finish(process.rank)

    def _keep(self, process: RankProcess) -> None:
        """Count the memory that a message takes; payloads of collectives are freed when they have arrived."""
        header, body = process.frames.sizes
        self.kept += OBJECTS * header + body
        if self.kept - self.broker.freed > MAX_KEPT or len(process.outgoing) > MAX_UNREAD:
            raise TooMuchError(f"sent more than {MAX_KEPT >> 20} MiB, the limit of a run")

    def _take(self, process: RankProcess, message: Any) -> None:
        """Handle one message of a rank. Raises MessageError for what the grader's code in a rank never sends."""
        try:
            self._keep(process)
            if process.ending and message["kind"] in ("returned", "raised"):
                raise MessageError("a message after the last one")
            if process.ending:
                return  # a worker thread was still at it when the main thread ended: too late to count
            match message["kind"]:
                case "call":
                    self.broker.post(process.rank, message)
                case "wait":
                    self.broker.wait(process.rank, message)
                case "event":
                    self.broker.note(process.rank, message)
                case "returned" | "raised" as ending:
                    process.never_waited = list(message["never_waited"])
                    process.value, process.error = message.get("value"), failure(message.get("error"))
                    process.ending = ending
                    self.broker.finish(process.rank)
                case other:
                    raise MessageError(f"a message of the kind {other}")
        except MessageError:
            raise
        except Exception as error:  # whatever a forged message holds, it must not end the grader
            raise MessageError(f"{type(error).__name__}: {error}") from error


def job_of(request: Request, rank: int, tree: str, debug: Debug | None) -> Job:
    """Return one rank's part of a request."""
    stops = list(debug.stops) if debug and debug.rank == rank else None
    inputs = request.inputs[rank]
    return Job(
        rank, len(request.inputs), tree, request.file, request.function, inputs, request.arguments, bool(debug), stops
    )
