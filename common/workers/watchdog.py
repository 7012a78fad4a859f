"""Stops a run that cannot continue, and says why: one row per rank, and what they show together.

Each rank has a thread that looks twice a second. It costs next to nothing while the main thread computes. There is
trouble if
    - another rank has ended, without a word or by an error, or
    - all ranks wait or have finished, not all in the same collective, and no byte moves: nobody can continue, or
    - one rank has made no progress for --hang_seconds: on GPUs, where a thread that waits is not asleep, this ends a
      deadlock.
A worker on its own is watched only while a step is due: nobody waits for it while it downloads, draws or is debugged.

The rank that notices sends its row. Then every rank sends one, the lowest rank prints them, and all exit.
Without this, a forgotten collective ends after 30 minutes, in Gloo's own time-out, which does not say where.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

from common.config import RunConfig
from common.paths import atomic_write
from common.workers.collectives import CollectiveLog, recorded, uses_nccl
from common.workers.comparison import conclude
from common.workers.exchange import Exchange
from common.workers.pulse import Pulse, Silence, Thread, frames_of, place, which_compute
from common.workers.rows import COMPARING, COMPUTES, FAILED, FINISHED, IDLE, STOPPED_FILE, WAITS, Row, names, table
from common.workers.standstill import Standstill

LOST_CONTACT = 3  # exit code of a worker that stops because of another one, or because nothing moves
TICK_SECONDS = 0.5
COLLECT_SECONDS = 3.0  # for the rows of ranks that run; dead ones are noticed at once
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")  # the flight recorder has only collectives


def stop(code: int) -> None:
    """End this process at once: Gloo's threads may wait for a peer forever, so a normal exit could hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def deadline(seconds: float, message: str) -> Iterator[None]:
    """End the process with one line if the block takes longer than `seconds`."""

    def end() -> None:
        print(f"error: {message} within {seconds:g} s (--join_seconds)", file=sys.stderr)
        stop(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def unrecorded_call(frames: list[tuple[str, int, str]], is_pending: bool) -> str:
    """Return the function of torch.distributed in which a thread waits without an entry in the recorder, or "".

    The recorder has no sends and receives. NCCL connects the ranks before it records their first collective, so there a
    thread can wait in any function while no collective `is_pending`.
    """
    file, _, function = frames[0] if frames else ("", 0, "")
    if os.path.join("torch", "distributed", "pipelining") in file:  # a schedule sends and receives before it waits
        return "batch_isend_irecv"
    is_function_of_torch = file.endswith(os.path.join("torch", "distributed", "distributed_c10d.py"))
    has_no_entry = function in POINT_TO_POINT or (uses_nccl() and not is_pending)
    return function if is_function_of_torch and has_no_entry else ""


class Watchdog:
    """The thread of one rank that watches the main thread and the other ranks' watchdogs.

    in_group: the rank has joined a process group, if only its own. Then it is watched from here to the end.
    """

    def __init__(self, config: RunConfig, pulse: Pulse, collectives: CollectiveLog, in_group: bool = True):
        self._config = config
        self._pulse = pulse
        self._collectives = collectives
        self._main = Thread()
        self._exchange = Exchange(config)
        self._closed = threading.Event()
        self._has_finished = False
        self._comparing = threading.Lock()
        self._lost: TracebackType | None = None  # of the call in which contact was lost
        self._ticks_with_lost_ranks = 0
        self._standstill = Standstill(self._exchange, self._main, config.world_size, lambda: self._row(self._state()))
        self._silence = Silence(pulse, may_rest=not in_group)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()

    @property
    def thread_ident(self) -> int | None:
        return self._thread.ident

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)
        self._exchange.close()

    def leave_together(self) -> None:
        """The process group's store is on rank 0, which waits here until the others no longer need it."""
        self._has_finished = True
        if self._config.rank == 0:
            self._exchange.wait_for_end(range(1, self._config.world_size), self._config.hang_seconds)
        else:
            self._exchange.tell("end", self._row(FINISHED).to_json())
        self.close()

    def failed(self, error: BaseException) -> None:
        """Leave word why this rank ends: the others notice only that it is gone."""
        note = " ".join(f"{type(error).__name__}: {error}".split())[:200].removesuffix(": ")
        row = self._row(FAILED, error.__traceback__, note=note)
        self._closed.set()
        self._exchange.tell("end", row.to_json())

    def lost_contact(self, reason: str, traceback: TracebackType | None) -> None:
        """Compare the ranks, because a call of this one has failed, and exit."""
        self._lost = traceback
        self._stop_run(f"lost contact with another worker, which may have died: {reason}")

    def _watch(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            if self._config.world_size > 1:
                if any(row.takes_part for row in self._exchange.last_rows().values()):
                    self._stop_run("")
                if lost := self._lost_ranks():
                    self._stop_run(f"lost contact with {names(lost)}")
                if self._standstill.look(self._has_finished):
                    self._stop_run("no rank can continue: each waits for another one")
            silent_seconds = TICK_SECONDS * self._silence.count()
            if silent_seconds > self._config.hang_seconds and not self._has_finished:
                if self._config.world_size > 1 or not self._main.is_in_debugger():
                    self._stop_run(f"no progress for {self._config.hang_seconds:g} s (--hang_seconds)")
                self._silence.ticks = 0

    def _lost_ranks(self) -> list[int]:
        """Return the ranks that have ended too early, once that was seen in three ticks.

        A rank that fails at the same time as another one reports its own error first.
        """
        lost = self._exchange.lost()
        self._ticks_with_lost_ranks = self._ticks_with_lost_ranks + 1 if lost else 0
        return lost if self._ticks_with_lost_ranks >= 3 else []

    def _state(self) -> str:
        """Return what the main thread does right now."""
        if self._has_finished:
            return FINISHED
        computes, pending = which_compute([self._main])[0], any(entry.is_pending for entry in recorded())
        waits = pending or unrecorded_call(self._main.frames(), pending) != ""
        if computes and not (waits and uses_nccl()):  # a thread that waits for a GPU uses its core fully
            return COMPUTES
        return WAITS if waits else IDLE

    def _row(self, state: str, traceback: TracebackType | None = None, note: str = "", takes_part: bool = False) -> Row:
        entries = recorded()
        self._collectives.drain(entries)
        frames: list[tuple[str, int, str]] = []  # of a rank that has finished: none
        if traceback:
            frames = frames_of(traceback)
        elif state != FINISHED:
            frames = self._main.frames()
        pending = [entry for entry in entries if entry.is_pending] if state == WAITS else []
        shown = pending[:1] or entries[-1:]
        call, collective = (str(shown[0]), f"{shown[0].number} {shown[0].signature}") if shown else ("", "")
        if state == WAITS and (function := unrecorded_call(frames, bool(pending))):
            call, collective = function, ""
        row = Row(
            rank=self._config.rank,
            state=state,
            place=place(frames),
            call=call,
            collective=collective,
            iteration=len(self._collectives.begun),
            phase=self._pulse.phase,
            note=note,
            calls=self._collectives.calls(),
            takes_part=takes_part,
        )
        return self._pulse.explain(row, self._main) if self._pulse.explain else row

    def _stop_run(self, reason: str) -> None:
        """Compare the ranks and exit; the first thread that calls this does it, any other waits for the exit."""
        if not self._comparing.acquire(blocking=False):
            threading.Event().wait()
        if reason:
            self._say(f"{reason}; {COMPARING}" if self._config.world_size > 1 else reason)
        row = self._row(WAITS if self._lost else self._state(), self._lost, takes_part=True)
        self._exchange.tell("end", row.to_json())
        rows = self._exchange.collect(COLLECT_SECONDS)
        if self._closed.is_set():
            return  # this rank has failed meanwhile, and its own error says more
        conclusion = conclude(rows)
        first = min(row.rank for row in rows if row.takes_part)
        if self._config.rank == first:
            self._print([*table(rows), conclusion])
            # Without this file, a report does not mention the run; on the screen is all that it would hold.
            with contextlib.suppress(OSError), atomic_write(self._config.output_dir / STOPPED_FILE) as file:
                cells = [cell for row in rows for cell in row.display_all()]
                json.dump({"conclusion": conclusion, "rows": cells}, file, indent=1)
        else:
            self._exchange.wait_for_end([first], COLLECT_SECONDS)
            self._say(f"stopped: {conclusion}")
        stop(LOST_CONTACT)

    def _say(self, text: str) -> None:
        self._print([f"rank {self._config.rank}: {text}"])

    def _print(self, lines: list[str]) -> None:
        print("\n" + "\n".join(lines), file=sys.stderr, flush=True)
