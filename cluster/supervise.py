"""Watches n ranks: shows their output, stops all of them when one fails, and says which one failed first and why.

Each rank runs under a guard (guard.py), here or on another node; closing a guard's input stops its rank. The ranks'
output comes through two pipes each. One loop, one thread:

    read what is there  ->  notice who has ended  ->  after a failure: wait a moment, report, stop the others
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from cluster.guard import exit_code
from common.errors import STOPPED_BY_ANOTHER
from common.workers.rows import REPORT_MARK, HangReport

TICK_SECONDS = 0.05
SETTLE_SECONDS = 2.5  # after a first failure, for the ranks that fail with it, and for their report of where each was
REPORTED_SECONDS = 5.0  # the same if the report is there: the others end by themselves
STOP_SECONDS = 3.5  # the guards need 2.5; a guard that is still there after this is killed, and its rank with it
TAIL_LINES = 5  # of a failed rank that said nothing new, show these again
REPORT_LINES, HELD_LINES = 60, 200
MAX_LINE = 1 << 16  # bytes: a longer one is cut, so that a rank that never ends its line does not fill our memory
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Command:
    """The command of one rank, guard included, and the node on which it runs, if not this machine."""

    words: list[str]
    node: str = ""


class Lines:
    """Cuts a stream of bytes into lines. Of a progress bar, which returns to the line's start, the last state stays."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the lines that `chunk` completes; an empty chunk ends the stream and completes the last one."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if self.rest and (not chunk or len(self.rest) > MAX_LINE):
            lines, self.rest = [*lines, self.rest], b""
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]


@dataclass
class Rank:
    """One started rank; `code` is its exit code once it has ended."""

    number: int
    node: str
    process: subprocess.Popen
    out: Lines = field(default_factory=Lines)
    err: Lines = field(default_factory=Lines)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    held: list[str] = field(default_factory=list)  # lines of stderr that wait, see is_holding
    last_held_at: float = 0.0
    code: int | None = None

    def __str__(self) -> str:
        return f"rank {self.number}" + (f" ({self.node})" if self.node else "")

    @property
    def is_holding(self) -> bool:
        """Lines of stderr wait a little: if they announce the rank's end, they belong in the report, once.

        After an error, a rank still has to shut down torch, which can take seconds on a busy machine.
        """
        patience = 10.0 if any("Traceback" in line or "rror" in line for line in self.held) else 0.7
        return time.monotonic() < self.last_held_at + patience and len(self.held) < HELD_LINES


def supervise(commands: list[Command], lifeline: int | None = None) -> int:
    """Run all commands to their end and return the exit code: 0, the first failing rank's, or 128 + signal.

    Args:
        commands: one for each rank, in order.
        lifeline: a file descriptor; when its other end is closed, all ranks are stopped.
    """
    received: list[int] = []
    before = {wanted: signal.getsignal(wanted) for wanted in STOP_SIGNALS}
    for wanted, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            signal.signal(wanted, lambda came, _: received.append(came))
    supervisor = Supervisor(received, lifeline)
    try:
        for number, command in enumerate(commands):
            supervisor.start(number, command)
        return supervisor.run()
    except BrokenPipeError:  # the reader of our own output has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it exits
        return 128 + signal.SIGPIPE
    finally:
        supervisor.stop_all()
        for wanted, handler in before.items():
            signal.signal(wanted, handler)


class Supervisor:
    """The ranks, and what has happened to them so far."""

    def __init__(self, received: list[int], lifeline: int | None) -> None:
        self.received = received  # signals that asked us to stop
        self.ranks: list[Rank] = []
        self.failed: list[Rank] = []  # in the order in which they failed
        self.first_failure_at = 0.0
        self.report: HangReport | None = None  # of the ranks together, where they found out why nobody can continue
        self.selector = selectors.DefaultSelector()
        self.lifeline = lifeline
        if lifeline is not None:
            self.selector.register(lifeline, selectors.EVENT_READ, None)

    def start(self, number: int, command: Command) -> None:
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C in the terminal reaches this process only, which then stops the ranks in order.
        process = subprocess.Popen(command.words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        rank = Rank(number, command.node, process)
        self.ranks.append(rank)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, rank)

    def run(self) -> int:
        """Run until every rank has ended or there is a reason to stop; then stop the rest, and return the exit code."""
        while self._running() and not self.received and not self._settled():
            self._read(TICK_SECONDS)
            self._notice_exits()
            if not self.failed:  # afterwards they belong to the report
                self._show_held()
        if self.received:
            say(f"{signal.Signals(self.received[0]).name}: stopping all ranks")
            self.stop_all()
            return 128 + self.received[0]
        if self.failed:
            cause = self._report_failure()
            self.stop_all()
            assert cause.code is not None
            return cause.code
        return 0

    def stop_all(self) -> None:
        """Close every guard's input and wait; what is still there after STOP_SECONDS is killed. Can be called twice."""
        for rank in self.ranks:
            assert rank.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.close()
        deadline = time.monotonic() + STOP_SECONDS
        while self._running():
            if time.monotonic() > deadline:
                for rank in self._running():
                    rank.process.kill()
            self._read(TICK_SECONDS)
            for rank in self._running():
                self._end(rank)
        if not self.failed:
            self._show_held(everything=True)

    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def _settled(self) -> bool:
        patience = REPORTED_SECONDS if self.report else SETTLE_SECONDS
        return bool(self.failed) and time.monotonic() > self.first_failure_at + patience

    def _read(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            if key.data is None:
                self._read_lifeline()
            else:
                self._read_stream(key.data, key.fileobj)

    def _read_lifeline(self) -> None:
        assert self.lifeline is not None
        if not os.read(self.lifeline, 4096):
            self.selector.unregister(self.lifeline)
            self.received.append(signal.SIGTERM)

    def _read_stream(self, rank: Rank, stream) -> bool:
        """Show what one pipe holds; False if that is nothing, now or ever again."""
        try:
            chunk = os.read(stream.fileno(), 65536)
        except BlockingIOError:
            return False
        from_out = stream is rank.process.stdout
        lines = (rank.out if from_out else rank.err).feed(chunk)
        for line in lines:
            self._take(rank, line, from_out)
        if not chunk:
            self.selector.unregister(stream)
            stream.close()
        return bool(chunk)

    def _take(self, rank: Rank, line: str, from_out: bool) -> None:
        if from_out:
            print(f"[{rank.number}] {line}", flush=True)
            rank.tail.append(line)
        elif line.startswith(REPORT_MARK):
            self.report = self.report or HangReport(**json.loads(line.removeprefix(REPORT_MARK)))
        elif line:
            rank.last_held_at = time.monotonic()
            rank.held.append(line)
            rank.tail.append(line)

    def _show_held(self, everything: bool = False) -> None:
        for rank in self.ranks:
            if everything or not rank.is_holding:
                show_lines(rank, rank.held)
                rank.held.clear()

    def _notice_exits(self) -> None:
        for rank in self._running():
            if self._end(rank) and rank.code:
                if not self.failed:
                    self.first_failure_at = time.monotonic()
                self.failed.append(rank)

    def _end(self, rank: Rank) -> bool:
        """If this rank has ended, show what it still had to say and keep its exit code."""
        code = rank.process.poll()
        if code is None:
            return False
        for stream in (rank.process.stdout, rank.process.stderr):
            assert stream is not None
            while not stream.closed and self._read_stream(rank, stream):
                pass
        rank.code = exit_code(code)
        return True

    def _report_failure(self) -> Rank:
        """Of the ranks that failed within a moment, name the cause: the first that did not end because of another."""
        cause = next((rank for rank in self.failed if rank.code != STOPPED_BY_ANOTHER), self.failed[0])
        if cause.code != STOPPED_BY_ANOTHER or not self.report:
            last = (cause.held or list(cause.tail))[-REPORT_LINES:]
            say(f"{cause} failed first: {meaning(cause.code or 0)}" + (". Its last lines:" if last else ""))
            show_lines(cause, last)
        if self.report:  # what the ranks have found out together explains all of them
            say("\n".join(self.report.lines()))
        for rank in self.failed:
            if rank is not cause and rank.code != STOPPED_BY_ANOTHER:
                # Of the others one line is enough, and none where it is the same mistake.
                reason = f": {rank.held[-1]}" if rank.held and rank.held[-1:] != cause.held[-1:] else ""
                say(f"afterwards {rank} failed: {meaning(rank.code or 0)}{reason}")
        stopped = [str(rank) for rank in self._running()]
        if stopped:
            say("stopping: " + ", ".join(stopped))
        return cause


def say(text: str) -> None:
    """Print the launcher's own words."""
    print(text, file=sys.stderr, flush=True)


def show_lines(rank: Rank, lines: list[str]) -> None:
    for text in lines:
        say(f"[{rank.number}] {text}")


def meaning(code: int) -> str:
    """An exit code in words; codes above 128 are a signal's."""
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
    return f"exit code {code}"
