"""Finds out that no rank can ever continue, within about three seconds and without a false alarm.

Two situations look like a deadlock but are not: a rank that computes while the others wait for it, and a large tensor
on a slow network. So there is an alarm only if the main threads of all ranks sleep, in different calls, while no byte
moves on any of their connections, and all of this at the same time.
"""

from collections.abc import Callable

from common.workers.comparison import is_deadlock
from common.workers.exchange import Exchange
from common.workers.pulse import STANDS_STILL, Thread, bytes_moved
from common.workers.rows import Row


class Standstill:
    """One rank's part in the search. `look` is called at every tick of the watchdog, `row` only when all ranks sleep.

    A rank whose main thread has slept since the last tick tells all ranks since which of its ticks, and the number of
    this tick. If all ranks were asleep when one of them read these numbers, and each has slept on for at least one tick
    since, then all slept at that moment.
    """

    def __init__(self, exchange: Exchange, thread: Thread, world_size: int, row: Callable[[], Row]) -> None:
        self._exchange, self._thread, self._world_size, self._row = exchange, thread, world_size, row
        self._cpu: float | None = None
        self._moved = -1  # bytes at the last tick; -1: the thread was awake, and nobody has counted
        self._tick = 0
        self._asleep_since = 0  # the tick; 0: awake
        self._row_text = ""  # of this sleep
        self._all_asleep: dict[int, tuple[int, int]] = {}  # rank -> its two ticks when all were first read asleep

    def look(self, has_finished: bool = False) -> bool:
        """Return whether no rank can continue. `has_finished`: this one waits for the others to finish, too."""
        self._tick += 1
        if not (self._is_asleep() or has_finished):
            if self._asleep_since:
                self._exchange.tell("sleep", None)
            self._asleep_since, self._row_text, self._all_asleep = 0, "", {}
            return False
        self._asleep_since = self._asleep_since or self._tick
        self._exchange.tell("sleep", [self._asleep_since, self._tick, self._row_text])
        sleeps = {rank: sleep for rank, sleep in list(self._exchange.heard["sleep"].items()) if sleep}
        if len(sleeps) < self._world_size:
            self._all_asleep = {}
            return False
        if not self._row_text:  # reading the flight recorder takes a tenth of a second, so not before it is needed
            self._row_text = self._row().to_json()
        before = self._all_asleep
        if any(rank not in before or before[rank][0] != since for rank, (since, _, _) in sleeps.items()):
            self._all_asleep = {rank: (since, tick) for rank, (since, tick, _) in sleeps.items()}
            return False
        if not all(tick > before[rank][1] and row for rank, (_, tick, row) in sleeps.items()):
            return False
        return is_deadlock([Row.from_json(row) for _, _, row in sleeps.values()])

    def _is_asleep(self) -> bool:
        """Return whether the main thread has slept since the last tick, and no byte has moved."""
        cpu, before = self._thread.cpu_seconds, self._cpu
        self._cpu = cpu
        if cpu is None or before is None or cpu - before > STANDS_STILL:
            self._moved = -1
            return False
        moved, moved_before = bytes_moved(self._exchange.ports), self._moved
        self._moved = moved
        return moved == moved_before
