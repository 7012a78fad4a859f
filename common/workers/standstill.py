"""Finds out that no rank can ever continue, within about three seconds and without a false alarm.

Two situations look like a deadlock but are not: a rank that computes while the others wait for it, and a large tensor
on a slow network. So there is an alarm only if the main threads of all ranks sleep, in different calls, while no byte
moves on any of their connections, and all of this at the same time.
"""

import json
from collections.abc import Callable

from common.workers.comparison import is_deadlock
from common.workers.exchange import Exchange
from common.workers.pulse import STANDS_STILL, Thread, bytes_moved
from common.workers.rows import Row


class Standstill:
    """One rank's part in the search. `look` is called at every tick of the watchdog, `row` only when all ranks sleep.

    A rank whose main thread has slept since the last tick tells all ranks how often it has looked. If all ranks
    were asleep when one of them read the counts, and each has looked once more since, then all slept at that moment.
    """

    def __init__(self, exchange: Exchange, thread: Thread, rank: int, world_size: int, row: Callable[[], Row]) -> None:
        self._exchange, self._thread, self._row = exchange, thread, row
        self._rank, self._world_size = rank, world_size
        self._cpu: float | None = None
        self._moved = -1  # bytes at the last tick; -1: the thread was awake, and nobody has counted
        self._sleep = 0  # number of this sleep
        self._looks = 0  # ticks that it has lasted
        self._has_row = False
        self._all_asleep: dict[int, tuple[int, int]] = {}  # rank -> its sleep and looks when all were first read asleep

    def look(self, has_finished: bool = False) -> bool:
        """Return whether no rank can continue. `has_finished`: this one waits for the others to finish, too."""
        if not (self._is_asleep() or has_finished):
            if self._looks:
                self._exchange.set(f"sleep/{self._rank}", "")
                self._looks, self._has_row, self._all_asleep = 0, False, {}
                self._sleep += 1
            return False
        self._looks += 1
        self._exchange.set(f"sleep/{self._rank}", json.dumps([self._sleep, self._looks]))
        texts = [self._exchange.get(f"sleep/{rank}") for rank in range(self._world_size)]
        if not all(texts):
            self._all_asleep = {}
            return False
        now = {rank: (sleep, looks) for rank, (sleep, looks) in enumerate(map(json.loads, texts))}
        if not self._has_row:
            # Reading the flight recorder takes a tenth of a second, so not before it is needed.
            self._exchange.set(f"row/{self._rank}", json.dumps([self._sleep, self._row().to_json()]))
            self._has_row = True
        if not self._all_asleep or any(now[rank][0] != sleep for rank, (sleep, _) in self._all_asleep.items()):
            self._all_asleep = now
            return False
        looked_again = all(now[rank][1] > looks for rank, (_, looks) in self._all_asleep.items())
        return looked_again and self._rows_show_a_deadlock(now)

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

    def _rows_show_a_deadlock(self, now: dict[int, tuple[int, int]]) -> bool:
        rows = []
        for rank, (sleep, _) in now.items():
            text = self._exchange.get(f"row/{rank}")
            of_sleep, row = json.loads(text) if text else (-1, "")
            if of_sleep != sleep:
                return False
            rows.append(Row.from_json(row))
        return is_deadlock(rows)
