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
from typing import Any

from grader.ranks.broker import Broker
from grader.ranks.endings import failure, rank_result
from grader.ranks.outcome import ENDLESS, Failure, Result
from grader.ranks.peer import Output, Peer
from grader.ranks.storages import Storages
from grader.ranks.zygote_process import ZygoteProcess
from grader.wire import values
from grader.wire.processes import memory
from grader.wire.request import Job, Request
from grader.wire.values import Fields, MessageError, TooMuchError

MAX_KEPT = 192 << 20  # bytes that one run keeps of what its ranks send, tensors and objects made of their JSON
MAX_UNREAD = 256 << 20  # bytes of answers that a rank does not take
OBJECTS = 12  # bytes of memory for a byte of JSON; for a list of empty lists 21
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
        self.peers = [Peer(rank) for rank in range(world_size)]
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
        socket.send_fds(zygote.control, [b"."], [fd for peer in self.peers for fd in peer.rank_fds])
        started = zygote.receive()
        self.folder, self.pids = started["folder"], started["pids"]
        self.selector.register(zygote.control, selectors.EVENT_READ, self._hear_zygote)
        for peer in self.peers:
            peer.give_away()
            self.selector.register(peer.line, selectors.EVENT_READ, lambda peer=peer: self._hear_rank(peer))
            for output in peer.outputs:
                self.selector.register(output.fd, selectors.EVENT_READ, lambda output=output: self._hear_output(output))
            peer.outgoing += values.pack(job_of(request, peer.rank, tree, debug).as_message())
            self._flush(peer)

    def close(self) -> None:
        self.selector.close()
        for peer in self.peers:
            peer.close()

    def result(self) -> Result:
        """Serve the ranks until all have ended, failed or met the deadline; then end them, and say how each ended."""
        limit = time.monotonic() + self.deadline
        self._serve(limit, lambda: self._all_ended() or self.broker.fault is not None)
        in_time = self._all_ended() or self.broker.fault is not None
        if self.debug and self.debug.rank is not None and self.broker.fault:  # somebody may be typing
            debugged = self.peers[self.debug.rank]
            self._serve(limit, lambda: debugged.code is not None)
        if self.broker.fault:
            self._serve(min(limit, time.monotonic() + GRACE), self._all_ended)
        if not self._all_ended():
            self.zygote.request(kind="stacks")
            self._serve(time.monotonic() + STACK_TIME, self._all_wrote_their_stack)
        unfinished = {peer.rank for peer in self.peers if peer.code is None}
        self.over = True
        self.zygote.request(kind="end")
        self._serve(time.monotonic() + END_TIME, lambda: self.gone)
        for output in (output for peer in self.peers for output in peer.outputs):
            while output.read():
                pass
        ranks = [rank_result(peer, self.broker, self.tree, peer.rank in unfinished, in_time) for peer in self.peers]
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
                self.peers[rank].outgoing += values.pack(message)
            self.broker.replies.clear()
            for peer in self.peers:
                self._flush(peer)

    def _all_ended(self) -> bool:
        return all(peer.code is not None for peer in self.peers)

    def _all_wrote_their_stack(self) -> bool:
        return all(peer.code is not None or b"<module>" in peer.stack.kept for peer in self.peers)

    def _flush(self, peer: Peer) -> None:
        """Write what fits: the other ranks must not wait for a rank that does not read."""
        if not peer.outgoing or not peer.listening:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while peer.outgoing:
                del peer.outgoing[: peer.line.send(peer.outgoing[: 1 << 20])]
        write = selectors.EVENT_WRITE if peer.outgoing else 0
        self.selector.modify(peer.line, selectors.EVENT_READ | write, self.selector.get_key(peer.line).data)

    def _hear_output(self, output: Output) -> None:
        if not output.read():
            self.selector.unregister(output.fd)

    def _hear_zygote(self) -> None:
        """Take a message of the zygote: a rank has exited, or all processes are gone."""
        try:
            message = self.zygote.receive()
        except RuntimeError:  # a rank has killed it, and with it died all the others
            self.selector.unregister(self.zygote.control)
            for peer in self.peers:
                peer.code = -signal.SIGKILL if peer.code is None else peer.code
            message = {"kind": "gone"}
            shutil.rmtree(self.folder, ignore_errors=True)
        if message["kind"] == "gone":
            self.gone = True
            return
        peer = self.peers[message["rank"]]
        while self._hear_rank(peer):
            pass
        if not peer.ending and not self.over and peer.frames.incomplete and message["code"] >= 0:
            self._disbelieve(peer, MessageError("its last bytes are not a complete message"))
        peer.code = message["code"] if peer.code is None else peer.code
        if not peer.ending and not self.over:
            self.broker.finish(peer.rank)

    def _hear_rank(self, peer: Peer) -> bool:
        """Take what a rank has sent. Return False if there is nothing, now or for good."""
        if not peer.listening or self.over:
            return False
        try:
            data = peer.line.recv(1 << 20)
            for message in peer.frames.feed(data):
                self._take(peer, message)
        except BlockingIOError:
            return False
        except ConnectionError:  # it has ended without reading all that was sent to it
            data = b""
        except TooMuchError as error:
            self._end_endless(peer, error)
            data = b""
        except MessageError as error:
            self._disbelieve(peer, error)
            data = b""
        if not data:
            peer.listening = False
            self.selector.unregister(peer.line)
        return bool(data)

    def _end_endless(self, peer: Peer, error: TooMuchError) -> None:
        """End a rank whose loop never ends, at the line of its last call. This is no tampering."""
        events = self.broker.events[peer.rank]
        peer.ending, peer.value, peer.code = "raised", None, 1
        peer.error = Failure(
            ENDLESS, f"{error}: does a loop in your code never end?", last_call=events[-1].where if events else ""
        )
        self.broker.finish(peer.rank)

    def _disbelieve(self, peer: Peer, error: MessageError) -> None:
        """End a rank that has sent what the grader's code never sends: other code writes to its connection."""
        peer.ending, peer.value, peer.code = "raised", None, 1
        peer.error = Failure("MessageError", str(error))
        self.broker.finish(peer.rank)

    def _keep(self, peer: Peer) -> None:
        """Count the memory that a message takes; payloads of collectives are freed when they have arrived."""
        header, body = peer.frames.sizes
        self.kept += OBJECTS * header + body
        if self.kept - self.broker.forgotten > MAX_KEPT or len(peer.outgoing) > MAX_UNREAD:
            raise TooMuchError(f"sent more than {MAX_KEPT >> 20} MiB, the limit of a run")

    def _take(self, peer: Peer, message: Any) -> None:
        """Handle one message of a rank. Raises MessageError for what the grader's code in a rank never sends."""
        try:
            self._keep(peer)
            match message["kind"]:
                case kind if peer.ending and kind in ("returned", "raised"):
                    raise MessageError("a message after the last one")
                case _ if peer.ending:
                    pass  # a worker thread was still at it when the main thread ended: too late to count
                case "call":
                    self.broker.post(peer.rank, message)
                case "wait":
                    self.broker.wait(peer.rank, message)
                case "event":
                    self.broker.note(peer.rank, message)
                case "returned" | "raised" as ending:
                    peer.never_waited = list(message["never_waited"])
                    peer.value, peer.error = message.get("value"), failure(message.get("error"))
                    peer.ending = ending
                    self.broker.finish(peer.rank)
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
