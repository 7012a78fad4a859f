"""Stops a run that cannot continue, and says why: one row per rank, and what they show together.

Each rank has a thread that looks twice a second. It ends the run if another rank has ended, without a word or by an
error, or if no rank has made progress for --hang_seconds (stillness.py). Rank 0 asks all others for their rows, on the
connections of the roll call, prints the table, and tells them to stop. If rank 0 has died, each of the others says what
it knows. While all is well, nothing is sent.

The rows are not kept in the process group's store: it is on rank 0, ends with it, and does not tell that a rank has
died, while a connection closes at once, on any network and with any backend. What a dead rank has called last is in its
file (pulse.py), which the ranks on its machine have open. A rank that is stuck inside gloo or NCCL holds no lock of
Python's, so this thread answers for it.
"""

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, NoReturn

from common.config import RunConfig
from common.errors import STOPPED_BY_ANOTHER
from common.paths import atomic_write
from common.workers.collectives import pending
from common.workers.frames import frame_of, frames_of, place
from common.workers.pulse import Pulse, read_calls
from common.workers.roll_call import Roll
from common.workers.rows import LAUNCHED, REPORT_MARK, STOPPED_FILE, RankRow, State, make_report
from common.workers.stillness import TICK_SECONDS, Stillness

GRACE_SECONDS = 1.0  # after a rank has ended, for those that fail at the same time: their own error says more
ANSWER_SECONDS = 3.0  # C code may hold Python's lock for a moment
C10D, TORCH_DISTRIBUTED = "/torch/distributed/distributed_c10d.py", "/torch/distributed/"


def stop(code: int) -> NoReturn:
    """End this process at once: Gloo's threads may wait for a peer forever, so a normal exit could hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Watchdog:
    """The thread of one rank that watches its main thread and the other ranks.

    notes: files with the last calls of the ranks on this machine, by rank. in_group: the rank has joined a process
    group, if only its own; then it is watched from here to the end.
    """

    def __init__(
        self, config: RunConfig, pulse: Pulse, roll: Roll, notes: Mapping[int, int], in_group: bool = True
    ) -> None:
        self._config, self._pulse, self._roll, self._notes = config, pulse, roll, notes
        self._channels = roll.channels
        self._main = threading.current_thread()
        own = [channel.fileno() for channel in self._channels.values()]
        self._stillness = Stillness(pulse, config.hang_seconds, own, may_rest=not in_group)
        self._rows: dict[int, RankRow] = {}  # the last one of each other rank
        self._last_word: RankRow | None = None  # of this rank: it has finished, or failed
        self._lost = ""  # why a call of a rank has failed that needs another rank
        self._lost_in: TracebackType | None = None  # this rank's call
        self._closed = threading.Event()
        self._is_over = threading.Event()  # on rank 0: the others have finished, or know why they must stop
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def close(self) -> None:
        self._closed.set()

    def leave_together(self) -> None:
        """The process group's store is on rank 0, which waits here until the others no longer need it."""
        self._say_last(replace(self._row(), state=State.FINISHED, place="", phase=""))
        if self._config.rank == 0 and self._channels:
            self._is_over.wait()
        self.close()

    def failed(self, error: BaseException) -> None:
        """Tell the others why this rank ends; they stop."""
        note = " ".join(f"{type(error).__name__}: {error}".split())[:200].removesuffix(": ")
        self._say_last(replace(self._row(), state=State.FAILED, place=place(frames_of(error.__traceback__)), note=note))
        if self._config.rank == 0 and self._channels:
            self._is_over.wait(GRACE_SECONDS + 2 * ANSWER_SECONDS)
        self.close()

    def lost_contact(self, reason: str, traceback: TracebackType | None) -> NoReturn:
        """Wait until this process is ended with the reason why a call of it has failed: another rank has ended."""
        self._lost, self._lost_in = reason, traceback
        if self._config.rank:
            self._channels[0].send(row=asdict(self._row()), lost=reason)
        while True:
            time.sleep(1)

    def _say_last(self, row: RankRow) -> None:
        self._last_word = row
        if self._config.rank:
            self._channels[0].send(row=asdict(row))

    # ------------------------------------------------------------------------ what the thread does, and only it

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._listen(TICK_SECONDS, until=self._is_broken)
            self._stillness.tick()
            if self._is_broken():
                self._listen(GRACE_SECONDS)
                if self._config.rank:  # rank 0 says what to do, unless it has ended
                    self._listen(ANSWER_SECONDS, until=lambda: self._channels[0].has_left)
                self._end("", self._ask())
            elif self._last_word or self._stillness.is_too_long():
                self._end_if_nobody_moves(self._ask())
                self._listen(ANSWER_SECONDS, until=self._is_broken)  # and do not ask again at once

    def _listen(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Read messages for so many seconds, or until something is so."""
        deadline = time.monotonic() + seconds
        while not (until() or self._closed.is_set()) and (left := deadline - time.monotonic()) > 0:
            ranks = {channel: rank for rank, channel in self._channels.items() if not channel.has_left}
            for channel in select.select(ranks, [], [], left)[0]:
                for message in channel.receive(0):
                    self._hear(ranks[channel], message)

    def _hear(self, rank: int, message: Mapping[str, Any]) -> None:
        if "ask" in message:
            self._channels[rank].send(row=asdict(self._last_word or self._row()))
        if "row" in message:
            self._rows[rank] = RankRow.from_message(message["row"])
            if all(self._fate(other) == State.FINISHED for other in self._channels):
                self._is_over.set()
        self._lost = message.get("lost", self._lost)
        if "stop" in message:
            if LAUNCHED not in os.environ:
                self._print([f"rank {self._config.rank}: stopped: {message['stop']}"])
            stop(STOPPED_BY_ANOTHER)

    def _fate(self, rank: int) -> State | None:
        """Return whether another rank has finished, failed or died; None if it still runs."""
        row = self._rows.get(rank)
        if row and row.state in (State.FINISHED, State.FAILED):
            return row.state
        return State.DIED if self._channels[rank].has_left else None

    def _is_broken(self) -> bool:
        """Return whether the ranks cannot end well any more."""
        own = self._last_word.state if self._last_word else None
        fates = [own, *(self._fate(rank) for rank in self._channels)]
        return len(fates) > 1 and bool(self._lost or State.FAILED in fates or State.DIED in fates)

    def _ask(self) -> list[RankRow]:
        """Return a row for each rank: those that run are asked for theirs."""
        running = [rank for rank in self._channels if not self._fate(rank)]
        for rank in running:
            self._rows.pop(rank, None)
            self._channels[rank].send(ask=True)
        self._listen(ANSWER_SECONDS, until=lambda: all(rank in self._rows or self._fate(rank) for rank in running))
        rows = {rank: self._rows.get(rank) or self._absent_row(rank) for rank in self._roll.processes}
        return list((rows | {self._config.rank: self._last_word or self._row()}).values())

    def _end_if_nobody_moves(self, rows: list[RankRow]) -> None:
        judged = [row for row in rows if row.state != State.FINISHED]
        if self._config.rank:  # rank 0 judges, as long as it answers
            judged = [row for row in rows[:1] if row.state == State.SILENT]
        if judged and all(row.is_still for row in judged):
            self._end(f"no progress for {self._config.hang_seconds:g} s (--hang_seconds)", rows)

    def _row(self) -> RankRow:
        """Return where the main thread is."""
        frames = list(frames_of(self._lost_in or frame_of(self._main)))
        innermost = frames[0][0] if frames else ""
        calls = read_calls(self._notes[self._config.rank]) if self._notes else []
        awaited = pending()
        # torch.distributed waits in its own files; its schedules of a pipeline also compute there.
        waits = (
            awaited or self._lost_in or C10D in innermost or (TORCH_DISTRIBUTED in innermost and self._stillness.idle)
        )
        row = RankRow(
            rank=self._config.rank,
            state=State.WAITS if waits else State.IDLE if self._stillness.idle else State.COMPUTES,
            place=place(frames),
            call=str(awaited or (calls[-1] if calls else "")),
            iteration=self._pulse.iteration,
            phase=self._pulse.phase,
            collectives=dict(self._pulse.collectives),
            per_iteration=self._pulse.per_iteration,
            calls=calls,
            is_still=self._stillness.is_too_long(),
        )
        return self._pulse.explain(row, self._main) if self._pulse.explain else row

    def _absent_row(self, rank: int) -> RankRow:
        """Return what is known of a rank that cannot say it."""
        state, note = State.UNKNOWN, str(self._roll.processes[rank])
        if rank in self._channels:
            state = State.DIED if self._channels[rank].has_left else State.SILENT
            note += ", see its own output" if state == State.DIED else ", perhaps stopped by Ctrl-Z"
        calls = read_calls(self._notes[rank]) if rank in self._notes else []
        last: dict[str, Any] = {"call": str(calls[-1]), "place": calls[-1].place} if calls else {}
        iteration = calls[-1].iteration if calls else 0
        return RankRow(rank, state, **last, iteration=iteration, note=note, calls=calls, is_still=True)

    def _end(self, reason: str, rows: list[RankRow]) -> None:
        """Say what the rows show, here and to the others, and end this process."""
        if self._closed.is_set():
            return  # it ends by itself
        if self._lost and not {row.state for row in rows} & {State.DIED, State.FAILED}:
            reason = f"contact was lost ({self._lost})"
        report = make_report(rows, reason)
        for channel in self._channels.values():
            channel.send(stop=report.conclusion)
        content = json.dumps(asdict(report))
        self._print([REPORT_MARK + content] if LAUNCHED in os.environ else report.lines())
        # Without this file, submit.py does not mention the run; on the screen is all that it would hold.
        with contextlib.suppress(OSError), atomic_write(self._config.output_dir / STOPPED_FILE) as file:
            file.write(content)
        self._listen(ANSWER_SECONDS, until=lambda: all(channel.has_left for channel in self._channels.values()))
        if self._last_word and self._last_word.state == State.FAILED:
            self._is_over.set()  # the main thread shows its error
            self._closed.set()
        else:
            stop(STOPPED_BY_ANOTHER)

    def _print(self, lines: list[str]) -> None:
        print("\n" + "\n".join(lines), file=sys.stderr, flush=True)
